"""Sequences that begin from what others have left, on a real device: steps are captured graphs, states go to
pinned memory and back in the order of the runner's stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.engine.gpu.stepper import SlotStepper
from hetero.engine.request import Request, Result
from hetero.engine.sample import SamplingParams
from hetero.engine.scheduler import Scheduler
from tests.gpu.test_runner_on_gpu import FAMILIES, errors, fused, options_of, random_tokens, runner_of, told
from tests.model.parity import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

AT = 70
"""Tokens of the common part: within a page."""


@pytest.mark.parametrize("family", FAMILIES)
def test_beginnings(family: str, tmp_path: Path) -> None:
    """States told within a prompt, while graphs and other prompts run on; turns of a talk; scores."""
    save_tiny(family, tmp_path)
    common, rest, other = random_tokens(AT), random_tokens(20, 5), random_tokens(10, 6)
    with fused(tmp_path, options_of(4), cache="50%") as loaded:
        runner = runner_of(loaded)
        assert not runner.eager, runner.why_eager
        want = told(runner, [*common, *rest], AT + 4)
        whole: list[torch.Tensor] = []
        slot = runner.claim()
        runner.prefill(slot, [*common, *rest], each=lambda index, rows: whole.append(rows.cpu()))
        runner.release(slot)
        rows = torch.cat(whole)
        assert len(rows) == AT + 20
        assert float(errors(rows[AT + 3 :], want).median()) < 0.02

        stepper = SlotStepper(runner)
        with torch.inference_mode():
            one = stepper.start()
            if not one.cuttable:
                one.mark(AT)
            one.advance([*common, *other])
            ((at, kept),) = one.marked() or [(AT, one.kept())]
            assert at == AT
            assert kept is not None
            for token in other[:8]:  # its state and its last page go on
                one.advance([token])
            for _ in range(2):
                warm = stepper.start()
                warm.begin(kept, AT, AT)
                logits = warm.advance(rest[:4])
                assert isinstance(logits, torch.Tensor)
                got = [logits.cpu()]
                for token in rest[4:]:
                    out = runner.step([(one.slot, 5), (warm.slot, token)]).logits
                    assert out is not None
                    got.append(out[1].cpu())
                assert float(errors(torch.stack(got), want).median()) < 0.02
                warm.close()
            kept.close()
            one.close()
        assert runner.pages.free == runner.pages.total

        engine = Scheduler(loaded.runnable, slots=4)
        prompt = tuple(common)
        for turn in range(3):
            ends: list[object] = []
            engine.submit(Request(prompt, SamplingParams(), 8, ignore_eos=True), ends.append)
            while engine.status().running + engine.status().waiting:
                engine.step()
            result = ends[-1]
            assert isinstance(result, Result)
            assert result.usage.cached_tokens == (len(prompt) - 6 if turn else 0)
            made = result.token_ids
            cold = told(runner, [*prompt, *made[:-1]], len(prompt)).float()
            # What was said is what a cold run says, or as good as that.
            lost = cold.max(-1).values - cold.gather(-1, torch.tensor(made)[:, None])[:, 0]
            assert float((lost / cold.std(-1)).median()) < 0.05
            prompt = (*prompt, *made, *random_tokens(5, turn))
        engine.close()
        assert runner.pages.free == runner.pages.total
