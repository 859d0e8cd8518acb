"""Kernels and host stops of programs in XLA's words."""

from spectr_jax.experiments.measure.kernels import count

PROGRAM = """HloModule jit_run, is_scheduled=true

%added (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} add(%p, %p)
}

%turn (t: f32[4]) -> f32[4] {
  %t = f32[4]{0} parameter(0)
  %one = f32[4]{0} fusion(%t), kind=kLoop, calls=%added, metadata={op_name="jit(run)/while/body/score/while/body/add"}
  ROOT %two = f32[4]{0} copy(%one), metadata={op_name="jit(run)/while/body/score/copy"}
}

%always (t: f32[4]) -> pred[] {
  %t = f32[4]{0} parameter(0)
  ROOT %yes = pred[] fusion(%t), kind=kLoop, calls=%added, metadata={op_name="jit(run)/while/body/score/while/cond/lt"}
}

%long (t: f32[4]) -> f32[4] {
  %t = f32[4]{0} parameter(0)
  %one = f32[4]{0} fusion(%t), kind=kLoop, calls=%added, metadata={op_name="jit(run)/while/body/vmap(draft)/add"}
  ROOT %two = f32[4]{0} fusion(%one), kind=kLoop, calls=%added, metadata={op_name="jit(run)/while/body/draft/add"}
}

%short (t: f32[4]) -> f32[4] {
  ROOT %t = f32[4]{0} parameter(0)
}

%body (t: f32[4]) -> f32[4] {
  %t = f32[4]{0} parameter(0)
  %chosen = f32[4]{0} conditional(%t), branch_computations={%short, %long}, metadata={op_name="jit(run)/while/body/draft/c"}
  %five = f32[4]{0} while(%chosen), condition=%always, body=%turn, backend_config={"known_trip_count":{"n":"5"}}
  %open = f32[4]{0} while(%five), condition=%always, body=%turn, metadata={op_name="jit(run)/while/body/score/while"}
  ROOT %sorted = f32[4]{0} sort(%open), dimensions={0}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %ready = f32[4]{0} copy(%p)
  ROOT %loop = f32[4]{0} while(%ready), condition=%always, body=%body
}
"""


def test_a_turn_of_the_loop_is_counted():
    counts = count(PROGRAM, ("draft", "score"))
    assert counts.kernels == {
        "draft": 2,
        "score": 5 * 3 + 3,
        "": 1,
    }  # The longer branch, and one turn of an open loop.
    assert {phase: stops for phase, stops in counts.stops.items() if stops} == {
        "draft": 1,
        "score": 1,
    }


def test_a_program_without_such_a_loop_has_none():
    without = (
        PROGRAM[: PROGRAM.index("ENTRY")]
        + "ENTRY %main (p: f32[4]) -> f32[4] {\n  ROOT %p = f32[4]{0} parameter(0)\n}\n"
    )
    assert count(without, ()).kernels.total() == 0
