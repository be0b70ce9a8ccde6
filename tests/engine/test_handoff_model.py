"""The state machine of docs/handoff.md over all interleavings of host, stream, workers and watchdog.

One lane, two layers that share a slot, two or three steps. The adversary may freeze a worker anywhere and
let it come back at any time, end its thread, make its work fail, and let the watchdog strike a worker that
is well. Checked in every reachable state: a step that ends without an error has read the results of its own
layers and leaves all flags clear; and there is a way to the end on which no frozen worker has to move. Four
machines that lack a part of the protocol show that the checker would notice.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

import pytest

LAYERS = 2
NAN = (-1, -1)
Value = tuple[int, int]  # step and layer that a payload or result belongs to


class Worker(NamedTuple):
    generation: int
    at: str = "poll"  # what it does next
    step: int = -1
    layer: int = 0
    value: Value = NAN
    failed: bool = False  # its work raised
    frozen: bool = False
    dead: bool = False


class State(NamedTuple):
    turn: tuple[int, str] = (0, "vacant")
    host: str = "begin"
    step: int = 0
    gpu: int = -1  # operation, five a layer; -1: nothing is launched
    lane: str = "idle"
    error: bool = False
    dirty: bool = False
    payload: Value = NAN
    result: Value = NAN
    submit: tuple[int, ...] = (0,) * LAYERS
    done: tuple[int, ...] = (0,) * LAYERS
    got: tuple[Value, ...] = (NAN,) * LAYERS
    dog: int = -1  # step of a release; -1: at rest. It holds the lock meanwhile
    tainted: int = -1  # generation
    workers: tuple[Worker, ...] = ()
    budget: tuple[int, int, int] = (0, 0, 0)  # freezes or deaths, failing work, strikes at the well
    touched: bool = False  # the adversary did something in this step


def put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def with_worker(state: State, index: int, **change: object) -> State:
    workers = list(state.workers)
    workers[index] = workers[index]._replace(**change)  # type: ignore[arg-type]
    return state._replace(workers=tuple(workers))


class Machine:
    """``flaw`` leaves out a part of the protocol."""

    def __init__(self, steps: int, flaw: str = "") -> None:
        self.steps = steps
        self.flaw = flaw

    def moves(self, s: State) -> Iterator[tuple[bool, State]]:
        """Every next state; whether it comes without the adversary."""
        yield from self.host(s)
        yield from self.stream(s)
        yield from self.watchdog(s)
        for index, worker in enumerate(s.workers):
            if worker.dead or worker.at == "gone":
                continue
            for after in self.worker(s, index, worker):
                yield not worker.frozen, after
            yield from self.adversary(s, index, worker)

    def adversary(self, s: State, index: int, worker: Worker) -> Iterator[tuple[bool, State]]:
        freezes, failures, strikes = s.budget
        if freezes and not worker.frozen and worker.generation == s.turn[0]:
            spent = s._replace(budget=(0, failures, strikes), touched=True)
            yield False, with_worker(spent, index, frozen=True)
            yield False, with_worker(spent, index, dead=True)
        if worker.frozen:
            yield False, with_worker(s, index, frozen=False)
        if failures and worker.at == "compute":
            spent = s._replace(budget=(freezes, 0, strikes), touched=True)
            yield False, with_worker(spent, index, at="publish?", failed=True)

    # -- the host

    def host(self, s: State) -> Iterator[tuple[bool, State]]:
        if s.dog >= 0 or s.host == "through":
            return
        if s.host == "begin":
            yield from ((True, after) for after in self.begin(s))
        elif s.host == "launch":
            yield True, s._replace(gpu=0, host="end")
        elif s.gpu == 5 * LAYERS and s.lane == "served":
            flags = any(s.submit) or any(s.done)
            wrong = s.error or flags
            if not s.error:
                assert not flags, f"flags of a good step: {s}"
                assert s.got == tuple((s.step, layer) for layer in range(LAYERS)), f"wrong results: {s}"
            assert s.touched or not wrong, f"an error out of nothing: {s}"
            last = s.step + 1 == self.steps
            yield (
                True,
                s._replace(
                    host="through" if last else "begin",
                    step=s.step + 1,
                    gpu=-1,
                    lane="idle",
                    dirty=s.dirty or wrong,
                    # A worker that is frozen already may fail the next step.
                    touched=any(w.frozen or w.dead for w in s.workers if w.generation == s.turn[0]),
                ),
            )

    def begin(self, s: State) -> Iterator[State]:
        office = self.office(s)
        if office is not None and s.workers[office].dead:
            s = self.put_out(s)
        if s.tainted >= 0 and self.flaw != "begin does not wait for a publication":
            old = next(w for w in s.workers if w.generation == s.tainted)
            if not (old.dead or old.at == "gone"):
                if old.frozen:
                    yield s._replace(host="through")  # it refuses with an error after its limit
                return
        s = s._replace(tainted=-1)
        if s.dirty and self.flaw != "flags are not cleared":
            s = s._replace(submit=(0,) * LAYERS, done=(0,) * LAYERS)
        if s.turn[1] == "vacant":
            generation = s.turn[0] + 1
            s = s._replace(turn=(generation, "poll"), workers=(*s.workers, Worker(generation)))
        yield s._replace(host="launch", lane="active", error=False, dirty=False)

    # -- the stream

    def stream(self, s: State) -> Iterator[tuple[bool, State]]:
        if not 0 <= s.gpu < 5 * LAYERS:
            return
        layer, operation = divmod(s.gpu, 5)
        after = s._replace(gpu=s.gpu + 1)
        if operation == 0:
            after = after._replace(payload=(s.step, layer))
        elif operation == 1:
            after = after._replace(submit=put(s.submit, layer, 1))
        elif operation == 2 and not s.done[layer]:
            return
        elif operation == 3:
            after = after._replace(done=put(s.done, layer, 0))
        elif operation == 4:
            got = (*s.got[:layer], s.result, *s.got[layer + 1 :])
            after = after._replace(got=got)
        yield True, after

    # -- a worker

    def worker(self, s: State, index: int, w: Worker) -> Iterator[State]:
        if w.at == "poll":
            if s.turn != (w.generation, "poll"):
                yield with_worker(s, index, at="gone")
            elif s.lane == "active":
                layer = w.layer if w.step == s.step else 0
                if layer < LAYERS and s.submit[layer]:
                    yield with_worker(s, index, at="work?", step=s.step, layer=layer)
        elif w.at == "work?":
            yield self.swap(s, index, "poll", "work", at="compute")
        elif w.at == "compute":
            yield with_worker(s, index, at="publish?", value=s.payload)
        elif w.at == "publish?":
            if self.flaw == "a worker publishes without asking":
                yield with_worker(s, index, at="release 0" if w.failed else "result")
            else:
                yield self.swap(s, index, "work", "publish", at="release 0" if w.failed else "result")
        elif w.at == "result":
            yield with_worker(s._replace(result=w.value), index, at="submit")
        elif w.at == "submit":
            yield with_worker(s._replace(submit=put(s.submit, w.layer, 0)), index, at="done")
        elif w.at == "done":
            yield with_worker(s._replace(done=put(s.done, w.layer, 1)), index, at="next")
        elif w.at == "next":
            after = with_worker(s, index, at="poll?", layer=w.layer + 1)
            if w.layer + 1 == LAYERS and s.lane == "active":
                after = after._replace(lane="served")
            yield after
        elif w.at == "poll?":
            yield self.swap(s, index, "publish", "poll", at="poll")
        else:
            number = int(w.at.split()[1])
            after, more = self.release(s, number)
            at = f"release {number + 1}" if more else "poll?"
            yield with_worker(after, index, at=at, failed=more, layer=LAYERS)

    def swap(self, s: State, index: int, *phases: str, at: str) -> State:
        """From one phase to another, if the worker is in office."""
        generation = s.workers[index].generation
        if s.turn != (generation, phases[0]):
            return with_worker(s, index, at="gone")
        return with_worker(s._replace(turn=(generation, phases[1])), index, at=at)

    def release(self, s: State, number: int) -> tuple[State, bool]:
        """One part of answering in advance, and whether more is to come."""
        if number == 0:
            return s._replace(error=True, result=NAN), True
        if number <= LAYERS:
            if self.flaw == "one layer is answered" and number > 1:
                return s, True
            return s._replace(done=put(s.done, number - 1, 1)), True
        return s._replace(lane="served" if s.lane == "active" else s.lane), False

    # -- the watchdog

    def office(self, s: State) -> int | None:
        return next((i for i, w in enumerate(s.workers) if w.generation == s.turn[0]), None)

    def put_out(self, s: State) -> State:
        generation, phase = s.turn
        tainted = generation if phase == "publish" else s.tainted
        return s._replace(turn=(generation + 1, "vacant"), tainted=tainted)

    def watchdog(self, s: State) -> Iterator[tuple[bool, State]]:
        if s.dog >= 0:
            after, more = self.release(s, s.dog)
            yield True, after._replace(dog=s.dog + 1 if more else -1)
            return
        office = self.office(s)
        if s.lane != "active" or office is None:
            return
        worker = s.workers[office]
        if worker.frozen or worker.dead:
            yield True, self.put_out(s)._replace(dog=0)
        elif s.budget[2]:
            spent = s._replace(budget=(*s.budget[:2], 0), touched=True)
            yield False, self.put_out(spent)._replace(dog=0)


def explore(machine: Machine, budget: tuple[int, int, int]) -> int:
    """Visit every reachable state; returns how many. Raises AssertionError where one is wrong or hangs."""
    first = State(budget=budget)
    seen = {first}
    queue = deque([first])
    before: dict[State, list[State]] = defaultdict(list)  # by moves without the adversary
    while queue:
        state = queue.popleft()
        for free, after in machine.moves(state):
            if free:
                before[after].append(state)
            if after not in seen:
                seen.add(after)
                queue.append(after)
    good = deque(state for state in seen if state.host == "through")
    reach = set(good)
    while good:
        for state in before[good.popleft()]:
            if state not in reach:
                reach.add(state)
                good.append(state)
    stuck = seen - reach
    assert not stuck, f"{len(stuck)} states hang, such as {min(stuck, key=lambda s: (s.step, s.gpu))}"
    return len(seen)


@pytest.mark.parametrize(
    ("steps", "budget"),
    # With (1, 1, 1) and three steps there are 1,792,105 states, all of them good; that takes minutes.
    [(3, (1, 0, 0)), (3, (0, 1, 0)), (3, (0, 0, 1)), (2, (0, 1, 1))],
)
def test_every_interleaving(steps: int, budget: tuple[int, int, int]) -> None:
    assert explore(Machine(steps), budget) > 100


@pytest.mark.parametrize(
    "flaw",
    [
        "a worker publishes without asking",
        "begin does not wait for a publication",
        "one layer is answered",
        "flags are not cleared",
    ],
)
def test_flaws_are_found(flaw: str) -> None:
    with pytest.raises(AssertionError, match=r"wrong results|flags of a good step|hang|out of nothing"):
        explore(Machine(2, flaw), (0, 0, 1))
