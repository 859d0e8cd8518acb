"""Tests that scripts/dev/kernels.py counts kernels, host stops and collectives of an HLO program."""

from helpers import names_in

count = names_in("scripts/dev/kernels.py").count

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

%below (t: (s32[], f32[4])) -> pred[] {
  %t = (s32[], f32[4]{0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %three = s32[]{:T(128)} constant(3), metadata={op_name="jit(run)/score"}
  ROOT %yes = pred[] compare(%n, %three), direction=LT
}

%inside (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  ROOT %g = f32[8]{0} all-gather(%p), dimensions={0}, metadata={op_name="jit(run)/draft/all"}
}

%reduced (t: f32[4]) -> f32[4] {
  %t = f32[4]{0} parameter(0)
  %begun = (f32[4], f32[4]) all-reduce-start(%t), metadata={op_name="jit(run)/score/sum"}
  %ended = f32[4]{0} all-reduce-done(%begun), metadata={op_name="jit(run)/score/sum"}
  ROOT %fused = f32[8]{0} fusion(%ended), kind=kCustom, calls=%inside
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
  %sum = f32[4]{0:T(8)} while(%open), condition=%below, body=%reduced, metadata={op_name="score/w"}
  ROOT %sorted = f32[4]{0} sort(%sum), dimensions={0}
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
    # 3 kernels. One loop has 5 iterations; the one of unknown length counts as one iteration. The
    # loop whose condition compares with 3 has, in each iteration, a comparison, a collective and a
    # fusion.
    assert counts.kernels == {"draft": 2, "score": 5 * 3 + 3 + 3, "": 1 + 2 * 3}
    stops = {phase: number for phase, number in counts.stops.items() if number}
    assert stops == {"draft": 1, "score": 1}


def test_collectives_are_counted_once_with_the_bytes_of_their_results():
    found = count(PROGRAM, ("draft", "score")).collectives
    assert found == {
        ("score", "all-reduce", 16, "jit(run)/score/sum"): 3,
        ("draft", "all-gather", 32, "jit(run)/draft/all"): 3,
    }


def test_a_program_without_a_loop_counts_no_kernels():
    program = "\n".join(line for line in PROGRAM.splitlines() if "%loop =" not in line)
    assert count(program, ()).kernels.total() == 0
