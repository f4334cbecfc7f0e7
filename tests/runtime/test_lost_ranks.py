"""A rank that is lost in a step, which the others finish (``on_lost_rank="finish"``)."""

from __future__ import annotations

import asyncio
import csv
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import long
from fork_server import fork_server  # noqa: F401 - a fixture
from pipeline.notes import Notes
from runtime import lost_ranks
from runtime.lost_ranks import LAST, LostRanks, expected
from runtime.toys import TOLERANCE, Ones

import rrfp
from rrfp.callbacks import Csv
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.errors import ConfigError, Origin, RankLostError
from rrfp.model.mesh import Mesh
from rrfp.pipeline.lost_rank.roll_call import Decision, RollCall, RollCallAnswer
from rrfp.pipeline.lost_rank.watch import SurvivorWatch
from rrfp.pipeline.options import complete
from rrfp.testing.clock import run_virtual
from rrfp.transports.rendezvous import LocalRendezvous


def close(left: list[Any], right: list[torch.Tensor]) -> bool:
    """Whether numbers that came from a rank are those expected."""
    return len(left) == len(right) and all(
        torch.allclose(torch.tensor(a, dtype=torch.float64), b, rtol=0.0, atol=TOLERANCE)
        for a, b in zip(left, right, strict=True)
    )


#: Further ranks that die behind the last one, of so many replicas, when (see `lost_ranks.dies_in_the_roll_call`), and
#: whether rank 0 hosts the store.
SECOND = [
    ((0,), 2, "running", False),
    long((0,), 2, "running", True),
    ((3,), 3, "grouping", True),  # in the smaller pipeline, with rank 4
    long((0, 2), 2, "beginning", False),  # nobody is left to run the step
    *(long((0,), 2, when, False) for when in ("deciding", "beginning", "done", "grouping")),
    long((2,), 2, "running", False),
    long((2,), 2, "grouping", True),  # with all that are left
    long((1,), 2, "grouping", True),
    long((1,), 2, "meeting", False),
    long((2,), 2, "gathering", False),  # in a group that is made
]


#: What a call of all ranks says when rank 2 was lost before.
NO_MORE = "rank 2 was lost, and no step follows: save a checkpoint with pipe=pipe, and end"


def strike(ranks: LostRanks, *victims: int) -> dict[int, Any]:
    """Kill ``victims`` in the first one's last backward, once their copies have come; what the others return."""
    assert ranks.hear(victims[0]) == "here"
    for victim in victims:
        assert ranks.hear(ranks.holder(victim)) == "copied"
    for victim in victims:
        ranks.strike(victim)
    return ranks.values({*range(ranks.mesh.size)} - {*victims})


def check_finished(values: dict[int, Any], lost: tuple[int, ...], replicas: int, **given: bool) -> None:
    """The step is what it would have been: losses, gradients and the update of every rank that is left."""
    loss, gradients, losses, parameters = expected(replicas, LAST + 1, **given)[LAST]
    for rank, value in values.items():
        stage, replica = divmod(rank, replicas)
        own_loss, own_losses, own_lost, own_gradients, own_parameters, _, step, text = value
        assert own_lost == lost
        assert abs(own_loss - loss) < TOLERANCE
        assert close([own_losses], [torch.tensor(losses[replica], dtype=torch.float64)])
        assert close(own_gradients, gradients[stage])
        assert close(own_parameters, parameters[stage])
        assert step == LAST + 1
        assert text.startswith(f"step {LAST}, loss ")


def check_told(folder: Path, values: dict[int, Any]) -> None:
    """Callbacks of the ranks that are left have seen the step end, and then the loss."""
    for rank, value in values.items():
        told = [line.split() for line in (folder / str(rank)).read_text().splitlines() if not line.startswith("stall")]
        steps = [(method, str(step)) for step in range(LAST + 1) for method in ("step_begun", "step_ended")]
        behind = str(LAST + 1)
        assert [(method, step) for method, step, _ in told] == [
            ("run_begun", "0"), *steps, ("aborted", behind), ("run_ended", behind),
        ]  # fmt: skip
        assert float(told[-3][2]) == value[0]
    with (folder / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step) for step in range(LAST + 1)]
    assert (rows[-1]["loss"], rows[-1]["compute/stage1"]) == (str(values[0][0]), "")
    assert float(rows[-1]["seconds"]) > 0


def check_resumed(folder: Path, replicas: int) -> None:
    """A new job goes on from the checkpoint as if nothing had happened."""
    for each in ("store", "gloo"):
        (folder / each).unlink(missing_ok=True)
    ranks = LostRanks(folder, lost_ranks.resumes, replicas=replicas)
    try:
        values = ranks.values(range(2 * replicas))
    finally:
        ranks.kill()
    for rank, (number, parameters) in values.items():
        assert number == LAST + 1
        assert close(parameters, expected(replicas, LAST + 2)[-1][-1][rank // replicas])


@pytest.mark.parametrize("victim", [long(0), long(1), long(2), 3])
def test_the_others_finish_the_step_and_a_new_job_goes_on(victim: int, tmp_path: Path) -> None:
    callbacks = [Notes(folder=tmp_path), Csv(tmp_path / "rows.csv")]
    ranks = LostRanks(tmp_path, lost_ranks.finishes, victim, callbacks=callbacks)
    try:
        values = strike(ranks, victim)
    finally:
        ranks.kill()
    check_finished(values, (victim,), 2)
    if victim == 3:
        check_told(tmp_path, values)
        check_resumed(tmp_path, 2)


@pytest.mark.parametrize("victim", [0, long(4)])
@pytest.mark.parametrize(
    "options",
    [
        long({}),
        {"tokens": False, "transport": "zmq", "split": True, "hint": "bfw"},
        long({"share_replicas": True}),
        long({"tied": True}),
        long({"share_replicas": "dealt"}),
    ],
)
def test_of_three_replicas_two_finish_it(victim: int, options: dict[str, Any], tmp_path: Path) -> None:
    ranks = LostRanks(tmp_path, lost_ranks.finishes, victim, replicas=3, **options)
    try:
        given = {"tokens": options.get("tokens", True), "tied": options.get("tied", False)}
        check_finished(strike(ranks, victim), (victim,), 3, **given)
    finally:
        ranks.kill()


@pytest.mark.long
def test_both_ranks_of_a_replica_may_be_lost(tmp_path: Path) -> None:
    ranks = LostRanks(tmp_path, lost_ranks.both_die, (1, 3))
    try:
        check_finished(strike(ranks, 1, 3), (1, 3), 2)
    finally:
        ranks.kill()


@pytest.mark.parametrize(("when", "steps"), [("before", LAST), long("behind", LAST + 1)])
def test_between_steps_the_others_save_what_is_complete(when: str, steps: int, tmp_path: Path) -> None:
    victim = 2
    ranks = LostRanks(tmp_path, lost_ranks.trains_until_lost, victim, when, callbacks=[Notes(folder=tmp_path)])
    try:
        values = ranks.values({0, 1, 3})
    finally:
        ranks.kill()
    for rank, (told, step, parameters, refused) in values.items():
        assert step == steps, told
        assert told == "lost" or told.startswith("rank 2 lost (")
        assert close(parameters, expected(2, steps)[-1][-1][rank // 2])
        assert refused == NO_MORE
        events = [line.split()[:2] for line in (tmp_path / str(rank)).read_text().splitlines()]
        assert events[-2:] == [["aborted", str(steps)], ["run_ended", str(steps)]]


def test_a_trace_of_all_ranks_is_refused_and_the_others_save(tmp_path: Path) -> None:
    ranks = LostRanks(tmp_path, lost_ranks.saves_a_trace, 2)
    try:
        values = ranks.values({0, 1, 3})
    finally:
        ranks.kill()
    for (lost, refused), step, is_there in values.values():
        assert lost[0] == "RankLostError"
        assert lost[1].startswith("rank 2 lost (")
        assert "A trace is of all ranks. Training steps before 2 are complete" in lost[1]
        assert refused == ("RrfpError", NO_MORE)
        assert (step, is_there) == (LAST, False)
    assert rrfp.checkpoint.latest(tmp_path / "saved") is not None


def test_gradients_are_clipped_and_unscaled_among_those_that_are_left(tmp_path: Path) -> None:
    ranks = LostRanks(tmp_path, lost_ranks.clips_and_scales, 3)
    try:
        values = strike(ranks, 3)
    finally:
        ranks.kill()
    norms = {norm for _, norm, _ in values.values()}
    assert len(norms) == 1
    assert values[0][2] == values[1][2]
    total = sum(float(torch.tensor(g).square().sum()) for rank in (0, 2) for g in values[rank][2])
    assert abs(total**0.5 - 0.01) < 1e-6


@pytest.mark.parametrize(("others", "replicas", "when", "hosted"), SECOND)
def test_a_further_loss_meanwhile_ends_the_job_by_name(
    others: tuple[int, ...], replicas: int, when: str, hosted: bool, tmp_path: Path
) -> None:
    victim = 2 * replicas - 1
    options: dict[str, Any] = {"replicas": replicas, "hosted": hosted}
    ranks = LostRanks(tmp_path, lost_ranks.dies_in_the_roll_call, victim, others, when, **options)
    try:
        assert ranks.hear(victim) == "here"
        assert ranks.hear(ranks.holder(victim)) == "copied"
        ranks.strike(victim)
        ends = [ranks.end(rank) for rank in {*range(victim)} - {*others}]
    finally:
        ranks.kill()
    for end in ends:
        assert end.error == "PipelineAborted", end
        assert end.culprit in others, end


def test_with_the_host_of_the_store_the_job_ends_by_its_name(tmp_path: Path) -> None:
    ranks = LostRanks(tmp_path, lost_ranks.finishes, 0, hosted=True)
    try:
        assert ranks.hear(0) == "here"
        assert ranks.hear(1) == "copied"
        ranks.strike(0)
        ends = [ranks.end(rank) for rank in (1, 2, 3)]
    finally:
        ranks.kill()
    for end in ends:
        assert (end.error, end.culprit) == ("PipelineAborted", 0), end


@pytest.mark.long
def test_with_a_store_that_is_left_they_finish_it(tmp_path: Path) -> None:
    ranks = LostRanks(tmp_path, lost_ranks.finishes, 3, hosted=True)
    try:
        check_finished(strike(ranks, 3), (3,), 2)
    finally:
        ranks.kill()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"on_lost_rank": "go on"}, "on_lost_rank is 'go on', must be one of: abort, finish"),
        ({"deterministic": True}, "deterministic is True, must be False with on_lost_rank='finish'"),
        ({"replay": "logs"}, "replay is set, must be None with on_lost_rank='finish'"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        complete({"on_lost_rank": "finish", **options})  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("dims", "module", "options", "reason"),
    [
        ({"pp": 2}, torch.nn.Linear(2, 2), {}, "for one replica"),
        ({"pp": 2, "tp": 2, "dp": 2}, torch.nn.Linear(2, 2), {}, r"where a group has 2 ranks \(pp 2, tp 2, dp 2\)"),
        ({"pp": 2, "dp": 2}, Ones(), {}, "for a StageProgram, whose steps are its own"),
        ({"pp": 2, "dp": 2}, torch.nn.Linear(2, 2), {"loop": "caller"}, "loop is 'caller', must be 'own'"),
    ],
)
def test_pipelines_that_it_does_not_go_with_are_refused(
    dims: dict[str, int], module: Any, options: dict[str, Any], reason: str
) -> None:
    place = rrfp.Topology.at(0, Mesh((*dims.items(),)))
    with pytest.raises(ConfigError, match=reason):
        rrfp.Pipeline(module, topology=place, on_lost_rank="finish", **options)


def test_an_awaited_pipeline_is_refused(tmp_path: Path) -> None:
    ranks = LostRanks(tmp_path, lost_ranks.awaits)
    try:
        values = ranks.values(range(4))
    finally:
        ranks.kill()
    assert all(text.startswith("on_lost_rank is 'finish', must be 'abort' with async with") for text in values.values())


def test_a_graph_of_parts_and_stages_in_one_process_are_refused() -> None:
    graph = rrfp.Graph()
    graph.part("model", stages=[0, 1])
    place = rrfp.Topology.at(0, Mesh((("pp", 2), ("dp", 2))))
    with pytest.raises(ConfigError, match="for a graph of parts"):
        rrfp.Pipeline({"model": torch.nn.Linear(2, 2)}, topology=place, graph=graph, on_lost_rank="finish")
    with pytest.raises(ConfigError, match="on_lost_rank is 'finish', must be 'abort' for one replica"):
        rrfp.local([torch.nn.Linear(2, 2)], on_lost_rank="finish")


def test_the_error_of_a_loss_between_steps_travels_between_processes() -> None:
    origin = Origin(1, None, "PeerLostError: its process ended", 3)
    error = pickle.loads(pickle.dumps(RankLostError(origin, (2, 3), 7, "Between two steps")))
    assert (error.origin, error.lost, error.step, error.reason) == (origin, (2, 3), 7, "Between two steps")
    assert str(error) == (
        "ranks 2 and 3 lost (stage 1 (rank 3): PeerLostError: its process ended). Between two steps. Training steps "
        "before 7 are complete: save a checkpoint with pipe=pipe, and end"
    )


class TestDecision:
    """What follows from the answers of those that are left, of two stages by so many replicas."""

    def of(self, replicas: int, *answers: RollCallAnswer) -> Decision:
        return Decision.of(answers, rrfp.Topology.at(0, Mesh((("pp", 2), ("dp", replicas)))))

    def test_whole_replicas_run_the_step_again(self) -> None:
        decision = self.of(2, RollCallAnswer(0, 5, True), RollCallAnswer(1, 5, False), RollCallAnswer(2, 5, True))
        assert decision == Decision((0, 1, 2), (3,), 5, "", (0,))
        assert decision.ranks(rrfp.Topology.at(0, Mesh((("pp", 2), ("dp", 2))))) == [0, 2]
        assert decision.takes_over(0, 2) == 1

    def test_each_of_several_broken_replicas_has_a_holder_of_its_own(self) -> None:
        decision = self.of(4, *(RollCallAnswer(rank, 1, True) for rank in range(8) if rank not in (0, 5)))
        assert (decision.why, decision.whole) == ("", (2, 3))
        assert [decision.takes_over(replica, 4) for replica in (2, 3)] == [0, 1]

    def test_a_replica_whose_holder_is_broken_too_cannot_be_replaced(self) -> None:
        decision = self.of(3, *(RollCallAnswer(rank, 1, True) for rank in range(6) if rank not in (0, 4)))
        assert decision.why == "Replicas 0 and 1 have lost ranks, and the second had the first one's microbatches"

    def test_a_step_that_some_ranks_know_to_be_complete_is_not_run_again(self) -> None:
        decision = self.of(2, RollCallAnswer(0, 6, True), RollCallAnswer(1, 5, True), RollCallAnswer(2, 5, True))
        assert (decision.step, bool(decision.why)) == (6, True)

    def test_without_the_lost_microbatches_it_is_not_run_again(self) -> None:
        decision = self.of(2, RollCallAnswer(0, 5, True), RollCallAnswer(1, 5, True), RollCallAnswer(2, 5, False))
        assert decision.why.startswith("The loss came before the others had the lost microbatches")

    def test_a_rank_that_cannot_go_back_says_why(self) -> None:
        decision = self.of(
            2, RollCallAnswer(0, 5, True), RollCallAnswer(1, 5, True, "it has gradients"), RollCallAnswer(2, 5, True)
        )
        assert decision.why == ("The step cannot be run again, because of stage 0, dp 1 (rank 1): it has gradients")


class TestRollCall:
    """Four ranks, two stages by two replicas, that meet in one process."""

    def of(self, rank: int, met: LocalRendezvous) -> RollCall:
        return RollCall(rrfp.Topology.at(rank, Mesh((("pp", 2), ("dp", 2)))), "run", None, met)

    async def hold(self, met: LocalRendezvous, lost: Mapping[int, int]) -> list[Decision | BaseException]:
        """How it ends on the ranks that take part; each has lost another one."""
        calls = [self.of(rank, met).hold(RollCallAnswer(rank, 5, True, lost=without)) for rank, without in lost.items()]
        return await asyncio.gather(*calls, return_exceptions=True)

    def test_all_that_are_left_come_to_one_decision(self) -> None:
        found = run_virtual(self.hold(LocalRendezvous(), {0: 2, 1: 2, 3: 2}))
        assert found == [Decision((0, 1, 3), (2,), 5, "", (1,))] * 3

    def test_a_rank_that_was_taken_for_lost_makes_no_decision_of_its_own(self) -> None:
        async def late() -> tuple[list[Decision | BaseException], list[Decision | BaseException]]:
            met = LocalRendezvous()
            others = await self.hold(met, {1: 0, 2: 0, 3: 0})
            return others, await self.hold(met, {0: 1})  # it wakes, and its connections are gone

        others, (late_one,) = run_virtual(late())
        assert others == [Decision((1, 2, 3), (0,), 5, "", (1,))] * 3
        assert isinstance(late_one, rrfp.PipelineAborted)
        assert late_one.origin.rank == 0
        assert "was taken for lost by the other ranks" in str(late_one)

    def test_it_names_itself_also_if_it_takes_for_lost_who_has_decided(self) -> None:
        async def late() -> list[Decision | BaseException]:
            met = LocalRendezvous()
            await self.hold(met, {0: 3, 1: 3, 2: 3})
            return await self.hold(met, {3: 0})

        (late_one,) = run_virtual(late())
        assert isinstance(late_one, rrfp.PipelineAborted)
        assert late_one.origin.rank == 3

    def test_nor_does_one_that_answers_together_with_the_others(self) -> None:
        stopped, *others = run_virtual(self.hold(LocalRendezvous(), {0: 1, 1: 0, 2: 0, 3: 0}))
        assert others == [Decision((1, 2, 3), (0,), 5, "", (1,))] * 3
        assert isinstance(stopped, rrfp.PipelineAborted)
        assert stopped.origin.rank == 0

    def test_a_rank_that_is_late_follows_the_decision_that_was_made_without_it(self) -> None:
        async def late() -> tuple[list[Decision | BaseException], list[Decision | BaseException]]:
            met = LocalRendezvous()
            others = await self.hold(met, {1: 2, 3: 2})
            return others, await self.hold(met, {0: 2})

        others, (late_one,) = run_virtual(late())
        assert others == [Decision((1, 3), (0, 2), 5, "", (1,))] * 2
        assert isinstance(late_one, rrfp.PipelineAborted)
        assert late_one.origin.rank == 0
        assert "did not answer in the roll call after a loss in time" in str(late_one)


class Muted(LocalRendezvous):
    """Of a rank that falls silent."""

    def __init__(self, met: LocalRendezvous) -> None:
        self._met = met
        self.is_silent = False

    async def publish(self, key: str, value: bytes) -> None:
        if not self.is_silent:
            await self._met.publish(key, value)

    async def lookup(self, key: str, timeout_s: float) -> bytes:
        return await self._met.lookup(key, timeout_s)


class TestSurvivorWatch:
    """Three ranks that are left, of two stages by two replicas, in one process."""

    def of(self, rank: int, met: LocalRendezvous) -> SurvivorWatch:
        place = rrfp.Topology.at(rank, Mesh((("pp", 2), ("dp", 2))))
        return SurvivorWatch(RollCall(place, "run", None, met), (0, 1, 3), place)

    def test_all_learn_which_one_is_lost(self) -> None:
        async def run() -> list[Any]:
            met = LocalRendezvous()
            muted = Muted(met)
            watches = [self.of(0, met), self.of(1, met), self.of(3, muted)]
            await asyncio.sleep(60.0)
            assert [watch.origin for watch in watches] == [None] * 3
            muted.is_silent = True
            waits = [watch.unless_lost(asyncio.sleep(1e6)) for watch in watches]
            return await asyncio.gather(*waits, return_exceptions=True)

        for found in run_virtual(run()):
            assert isinstance(found, rrfp.PipelineAborted)
            assert (found.origin.stage, found.origin.rank) == (1, 3)

    def test_who_leaves_is_not_lost_and_the_rank_behind_it_is_watched_on(self) -> None:
        async def run() -> list[Any]:
            met = LocalRendezvous()
            muted = Muted(met)
            first, leaving, last = self.of(0, met), self.of(1, met), self.of(3, muted)
            await asyncio.sleep(10.0)
            await leaving.leave()
            await asyncio.sleep(60.0)
            assert (first.origin, last.origin) == (None, None)
            muted.is_silent = True
            return [(await first.loss()).origin.rank, leaving.origin]

        assert run_virtual(run()) == [3, None]


def test_a_lane_that_does_not_say_that_it_is_over_is_named_and_not_waited_for_without_end() -> None:
    class Silent(ThreadLane):
        @property
        def is_over(self) -> bool:
            return False

    with rrfp.local(
        [Ones()], loss_fn=torch.nn.functional.mse_loss, lane=lambda _: Silent(), connect_timeout=0.2
    ) as pipe:
        session = pipe._session
        with pytest.raises(rrfp.RrfpError, match=r"after 0\.2 s \(connect_timeout\), or the lane does not say"):
            session.submit(session._retire()).result()
