"""Tests that scripts/dev/kernels.py counts the kernels and host stops of an HLO program."""

import pathlib
import runpy

count = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "scripts/dev/kernels.py"))["count"]

PROGRAM = """HloModule jit_run, is_scheduled=true

%added (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} add(%p, %p)
}

%turn (t: f32[4]) -> f32[4] {
  %t = f32[4]{0} parameter(0)
  %one = f32[4]{0} fusion(%t), calls=%added, metadata={op_name="jit(run)/score/while/body/add"}
  ROOT %two = f32[4]{0} copy(%one), metadata={op_name="jit(run)/score/copy"}
}

%go (t: f32[4]) -> pred[] {
  %t = f32[4]{0} parameter(0)
  ROOT %yes = pred[] fusion(%t), calls=%added, metadata={op_name="jit(run)/score/while/cond/lt"}
}

%long (t: f32[4]) -> f32[4] {
  %t = f32[4]{0} parameter(0)
  %one = f32[4]{0} fusion(%t), calls=%added, metadata={op_name="jit(run)/vmap(draft)/add"}
  ROOT %two = f32[4]{0} fusion(%one), calls=%added, metadata={op_name="jit(run)/draft/add"}
}

%short (t: f32[4]) -> f32[4] {
  ROOT %t = f32[4]{0} parameter(0)
}

%body (t: f32[4]) -> f32[4] {
  %t = f32[4]{0} parameter(0)
  %c = f32[4]{0} conditional(%t), branch_computations={%short, %long}, metadata={op_name="draft/c"}
  %five = f32[4] while(%c), condition=%go, body=%turn, backend_config={"known_trip_count":{"n":"5"}}
  %open = f32[4] while(%five), condition=%go, body=%turn, metadata={op_name="jit(run)/score/while"}
  ROOT %sorted = f32[4]{0} sort(%open), dimensions={0}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %ready = f32[4]{0} copy(%p)
  ROOT %loop = f32[4]{0} while(%ready), condition=%go, body=%body
}
"""


def test_kernels_and_host_stops_of_one_iteration_are_counted():
    counts = count(PROGRAM, ("draft", "score"))
    # The conditional counts as its longer branch, which has 2 kernels. An iteration of each loop has
    # 3 kernels. One loop has 5 iterations; the one of unknown length counts as one iteration.
    assert counts.kernels == {"draft": 2, "score": 5 * 3 + 3, "": 1}
    stops = {phase: number for phase, number in counts.stops.items() if number}
    assert stops == {"draft": 1, "score": 1}


def test_a_program_without_a_loop_counts_no_kernels():
    program = "\n".join(line for line in PROGRAM.splitlines() if "%loop =" not in line)
    assert count(program, ()).kernels.total() == 0
