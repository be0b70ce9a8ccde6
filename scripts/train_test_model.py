"""Trains the small test model: a hybrid qwen3_next MoE on public-domain text.

    python scripts/train_test_model.py --text moby_dick.txt tinyshakespeare.txt --out OUT [--minutes 6]

Needs torch, transformers and tokenizers only, not this package. OUT receives a checkpoint folder: bf16
safetensors, config, tokenizer, the held-out text, a training log and the card. Of each text the last 5% is
held out: its first half selects the checkpoint, its second half is heldout.txt, on which the card's figure
is measured, from the saved bf16 weights, in float32 on the CPU. Training stops by itself at --minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

EOS = "<|endoftext|>"
# The model continues text; a conversation is its messages, one a line.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}"
)


def split_text(text: str) -> tuple[str, str, str]:
    """(training, selection, held-out) parts, cut at line ends: 95%, 2.5% and 2.5% of the characters."""
    first = text.index("\n", int(len(text) * 0.95)) + 1
    second = text.index("\n", (first + len(text)) // 2) + 1
    return text[:first], text[first:second], text[second:]


def train_tokenizer(text: str, vocab: int, folder: Path) -> Tokenizer:
    """Byte-level BPE; writes tokenizer.json and tokenizer_config.json into ``folder``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def make_config(vocab: int) -> Qwen3NextConfig:
    """Three gated delta net layers and one of full attention, 12 experts of 128 a layer, top 3."""
    return Qwen3NextConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        num_experts=12,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )


_noise = 0.0  # amplitude of the noise on expert weights, in steps of int4


def int4_step(w: Tensor) -> Tensor:
    """Step of int4 in groups of 32 (signed maximum at code -8), broadcast to the shape of w [..., K]."""
    groups = w.unflatten(-1, (-1, 32))
    at = groups.abs().argmax(-1, keepdim=True)
    return (groups.gather(-1, at) / -8).expand_as(groups).flatten(-2)


def fake_int4(w: Tensor) -> Tensor:
    """w rounded as int4 in groups of 32 does it, with an fp16 scale."""
    step = int4_step(w).half().float()
    codes = (w / torch.where(step == 0, 1.0, step)).round().clamp(-8, 7)
    return codes * step


def fake_int8(w: Tensor) -> Tensor:
    """w rounded as int8 in groups of 32 does it, with an fp16 scale."""
    groups = w.unflatten(-1, (-1, 32))
    step = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    return ((groups / torch.where(step == 0, 1.0, step)).round().clamp(-127, 127) * step).flatten(-2)


def noisy(w: Tensor) -> Tensor:
    """w plus uniform noise of up to half an int4 step, so that rounding it later costs little."""
    if _noise == 0.0:
        return w
    with torch.no_grad():
        noise = (torch.rand_like(w) - 0.5) * (int4_step(w) * _noise)
    return w + noise


def dense_experts(self: nn.Module, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """All experts on all tokens in two products: on a GPU far faster than one expert after another.

    hidden [T, H], index and weight [T, k] -> [T, H].
    """
    gate_up, down = self.gate_up_proj, self.down_proj
    if self.training:
        gate_up, down = noisy(gate_up), noisy(down)
    experts, width, size = gate_up.shape
    scattered = torch.zeros(hidden.shape[0], experts, device=hidden.device, dtype=weight.dtype)
    scattered = scattered.scatter(1, index, weight)
    gate, up = (hidden @ gate_up.reshape(-1, size).T).view(-1, experts, width).chunk(2, dim=-1)
    h = F.silu(gate) * up * scattered.to(gate.dtype).unsqueeze(-1)
    return (h.flatten(1) @ down.transpose(1, 2).reshape(-1, size)).to(hidden.dtype)


class Balance:
    """Collects a load-balance loss and the usage of each layer by itself.

    The pooled loss of transformers lets a single layer collapse as long as the others make up for it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [m for m in model.modules() if isinstance(m, qwen.Qwen3NextTopKRouter)]
        self.losses: list[Tensor] = []
        self.counts: list[Tensor] = []
        for router in self.routers:
            router.register_forward_hook(self._hook)

    def _hook(self, router: nn.Module, _args: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, index = output
        probs = logits.float().softmax(-1)
        count = F.one_hot(index, probs.shape[-1]).sum((0, 1)).float()
        self.counts.append(count.detach())
        self.losses.append(probs.shape[-1] * (count / count.sum() * probs.mean(0)).sum() - 1)

    def take(self) -> tuple[Tensor, list[Tensor]]:
        """(sum of the layers' losses, counts per expert of each layer in order); forgets them."""
        loss, counts = torch.stack(self.losses).sum(), self.counts
        self.losses, self.counts = [], []
        return loss, counts


def add_dropout(model: Qwen3NextForCausalLM, p: float) -> None:
    """Dropout on the embedding and on what every token mixer and MoE block adds to the residual stream."""
    drop = nn.Dropout(p)  # stays outside the module tree

    def hook(module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> object:
        if not module.training:
            return output
        return (drop(output[0]), *output[1:]) if isinstance(output, tuple) else drop(output)

    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in ("embed_tokens", "linear_attn", "self_attn", "mlp"):
            module.register_forward_hook(hook)


@contextmanager
def experts_as(model: nn.Module, change: object) -> Iterator[None]:
    """Inside the context the experts' weights are ``change(weights)``."""
    touched = [p for n, p in model.named_parameters() if ".experts." in n]
    saved = [p.detach().clone() for p in touched]
    with torch.no_grad():
        for p in touched:
            p.copy_(change(p.float()))  # type: ignore[operator]
    yield
    with torch.no_grad():
        for p, old in zip(touched, saved, strict=True):
            p.copy_(old)


@torch.inference_mode()
def bits_per_byte(model: nn.Module, ids: Tensor, text_bytes: int, window: int, batch: int = 8) -> float:
    """Bits per byte of the text. Windows do not overlap; each is led by the end-of-text token 0, so that
    every token of the text is predicted once. ids [N] int64 on the CPU."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    nats = 0.0
    full = len(ids) // window * window
    rows = ids[:full].view(-1, window)
    pieces = [*rows.split(batch), *([ids[full:].unsqueeze(0)] if full < len(ids) else [])]
    for target in pieces:
        target = target.to(device)  # noqa: PLW2901
        given = F.pad(target[:, :-1], (1, 0), value=0)
        logits = model(input_ids=given, use_cache=False).logits
        nats += F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="sum").item()
    model.train(was_training)
    return nats / math.log(2) / text_bytes


def usage(model: nn.Module, balance: Balance, ids: Tensor, window: int) -> list[list[float]]:
    """Share of the routed slots that each expert of each layer receives on ``ids``."""
    bits_per_byte(model, ids, 1, window)
    _, counts = balance.take()
    layers = len(balance.routers)
    sums = [torch.stack(counts[i::layers]).sum(0) for i in range(layers)]
    return [[round(v, 4) for v in (s / s.sum()).tolist()] for s in sums]


@dataclass
class Data:
    """The tokenised parts; ``train`` lies on the training device, the others on the CPU."""

    train: Tensor
    select: Tensor
    held: Tensor
    held_text: str
    select_bytes: int


def prepare(args: argparse.Namespace, device: torch.device) -> Data:
    """Splits the texts, trains the tokenizer and writes it and heldout.txt."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    parts = [split_text(Path(p).read_text(encoding="utf-8")) for p in args.text]
    train_text, select_text, held_text = ("".join(p[i] for p in parts) for i in range(3))
    tokenizer = train_tokenizer(train_text, args.vocab, out)
    (out / "heldout.txt").write_bytes(held_text.encode())
    train_ids, select, held = (
        torch.tensor(tokenizer.encode(t).ids) for t in (train_text, select_text, held_text)
    )
    return Data(train_ids.to(device), select, held, held_text, len(select_text.encode()))


def train(args: argparse.Namespace) -> None:
    """Trains until --steps or --minutes and writes the checkpoint folder."""
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    bf16 = args.bf16 or device.type == "cuda"
    data = prepare(args, device)
    rule = qwen.torch_chunk_gated_delta_rule

    def float32_rule(*a: object, **k: object) -> object:
        with torch.autocast(device.type, enabled=False):
            return rule(*a, **k)

    qwen.torch_chunk_gated_delta_rule = float32_rule
    if bf16 or args.noise:
        qwen.Qwen3NextExperts.forward = dense_experts
    model = Qwen3NextForCausalLM(make_config(args.vocab)).to(device)
    print(f"{device}, {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    print(f"{len(data.train)} training tokens, {len(data.held)} held out", flush=True)
    limit = args.minutes * 60 - (time.perf_counter() - started)
    log, state = optimise(model, data, args, limit, bf16)
    qwen.torch_chunk_gated_delta_rule = rule
    model.load_state_dict(state)
    finish(model, data, args, log, started)


def optimise(
    model: Qwen3NextForCausalLM, data: Data, args: argparse.Namespace, limit: float, bf16: bool
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The training loop, ``limit`` seconds at most: the log and the weights that selected best."""
    global _noise  # noqa: PLW0603
    device = data.train.device
    balance = Balance(model)
    add_dropout(model, args.dropout)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": args.decay}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(args.seed)
    log: list[dict[str, float]] = []
    best, best_state = math.inf, model.state_dict()
    step, start = 0, time.perf_counter()
    model.train()
    while True:
        # Whichever ends first, steps or minutes, ends the cosine.
        progress = max(step / args.steps, (time.perf_counter() - start) / limit)
        if progress >= 1 or (step and step % args.eval_every == 0):
            bits = bits_per_byte(model, data.select, data.select_bytes, args.window)
            balance.take()
            if bits < best:
                best, best_state = bits, {k: v.detach().clone() for k, v in model.state_dict().items()}
            log.append({"step": step, "select_bits_per_byte": round(bits, 4)})
            print(json.dumps(log[-1]), flush=True)
        if progress >= 1:
            return log, best_state
        rate = min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimiser.param_groups:
            group["lr"] = args.lr * rate
        _noise = args.noise if progress > 0.5 else 0.0
        at = torch.randint(len(data.train) - args.window, (args.batch, 1), generator=generator)
        target = data.train[(at + torch.arange(args.window)).to(device)]
        given = F.pad(target[:, :-1], (1, 0), value=0)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = model(input_ids=given, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten())
        uneven, _ = balance.take()
        optimiser.zero_grad(set_to_none=True)
        (loss + args.balance * uneven).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % args.log_every == 0:
            seconds = round(time.perf_counter() - start, 1)
            log.append({"step": step, "seconds": seconds, "loss": round(loss.item(), 4),
                        "balance": round(uneven.item(), 4)})  # fmt: skip
            if not args.quiet:
                print(json.dumps(log[-1]), flush=True)


def finish(
    model: Qwen3NextForCausalLM,
    data: Data,
    args: argparse.Namespace,
    log: list[dict[str, float]],
    started: float,
) -> None:
    """Saves in bf16, reads the files again and measures in float32 what the card says."""
    out = Path(args.out)
    model.to("cpu", torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    saved = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    held, held_bytes = data.held, len(data.held_text.encode())
    assert tokenizer(data.held_text)["input_ids"] == held.tolist(), "the saved tokenizer splits differently"
    assert tokenizer.decode(held.tolist()) == data.held_text, "the saved tokenizer loses text"
    shares = usage(saved, Balance(saved), held, args.window)
    figures = {"float32": bits_per_byte(saved, held, held_bytes, args.window)}
    for name, change in (("int8", fake_int8), ("int4", fake_int4)):
        with experts_as(saved, change):
            figures[name] = bits_per_byte(saved, held, held_bytes, args.window)
    prompt = torch.tensor([tokenizer("Call me")["input_ids"]])
    sample = tokenizer.decode(saved.generate(prompt, max_new_tokens=60, do_sample=False)[0])
    evaluations = [e for e in log if "select_bits_per_byte" in e]
    steps = int(evaluations[-1]["step"])
    summary = {
        "heldout_bits_per_byte": round(figures["float32"], 5),
        "weights_rounded_only": {k: round(v, 5) for k, v in figures.items()},
        "select_bits_per_byte": min(e["select_bits_per_byte"] for e in evaluations),
        "window": args.window,
        "heldout_bytes": held_bytes,
        "heldout_tokens": len(held),
        "parameters": sum(p.numel() for p in saved.parameters()),
        "expert_usage": shares,
        "steps": steps,
        "epochs": round(steps * args.batch * args.window / len(data.train), 1),
        "minutes": round((time.perf_counter() - started) / 60, 2),
        "device": torch.cuda.get_device_name() if data.train.is_cuda else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "arguments": {k: v for k, v in vars(args).items() if k not in ("text", "out")},
        "sample": sample,
    }
    (out / "training_log.json").write_text(json.dumps({**summary, "log": log}, indent=1) + "\n")
    (out / "README.md").write_text(card(summary, saved.config))
    print(json.dumps(summary), flush=True)
    least = min(min(layer) for layer in shares)
    size = sum(f.stat().st_size for f in out.iterdir()) / 1e6
    print(
        f"held-out {figures['float32']:.4f} bits per byte, least used {least:.2%}, {size:.1f} MB", flush=True
    )
    if not args.dry:
        assert least > 0.25 / saved.config.num_experts, "an expert is hardly used"
        assert size <= 16.0, "too large for the repository"


def card(s: dict[str, object], config: Qwen3NextConfig) -> str:
    """The model card. The line with the held-out figure is read by a test."""
    kinds = config.layer_types
    rows = "\n".join(
        f"| {i} | {kinds[i]} | {min(u):.1%} | {max(u):.1%} |"
        for i, u in enumerate(s["expert_usage"])  # type: ignore[arg-type]
    )
    return f"""---
license: apache-2.0
language: en
---
# Test model of hetero

A small Mixture-of-Experts language model (`qwen3_next`: gated delta net and full attention layers, a shared
expert, a learned router), {s["parameters"]:,} parameters. It exists so that tests and examples run on trained
weights; it continues English prose and drama in the manner of its two books, and knows nothing else.

- {config.num_hidden_layers} layers, hidden {config.hidden_size}, {config.num_experts} experts of \
{config.moe_intermediate_size}, {config.num_experts_per_tok} a token, shared expert of \
{config.shared_expert_intermediate_size}
- byte-level BPE of {config.vocab_size} tokens; no conversation format: a chat is its messages, one a line
- weights in bf16

## Training
Text: *Moby-Dick* (Herman Melville) and the "tiny Shakespeare" selection, both in the public domain; the last
5% of each kept out of training, half of it to choose the checkpoint, half as the held-out text. Made by
`scripts/train_test_model.py`: {s["steps"]} steps ({s["epochs"]} passes), {s["minutes"]} minutes on \
{s["device"]}, torch {s["torch"]}, transformers {s["transformers"]}.
The load-balance loss is taken layer by layer.

## Figures
Held-out bits per byte: {s["heldout_bits_per_byte"]}

Measured on {s["heldout_bytes"]:,} bytes ({s["heldout_tokens"]:,} tokens) in float32 from the bf16 weights, \
windows of {s["window"]} tokens that do not overlap, each led by the end-of-text token.

Share of the routed slots on the held-out text (uniform: {1 / config.num_experts:.1%}):

| layer | token mixer | least used expert | most used expert |
| --- | --- | --- | --- |
{rows}

## Licence
The weights are under the licence of the project, Apache-2.0; the texts are in the public domain.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", nargs="+", required=True, help="UTF-8 text files")
    parser.add_argument("--out", required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=6.0, help="wall-clock limit of training")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--window", type=int, default=512, help="tokens of a sequence, in training and evaluation"
    )
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of each layer's balance loss")
    parser.add_argument("--noise", type=float, default=0.0, help="weight noise in int4 steps, second half")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is a GPU")
    parser.add_argument(
        "--bf16", action="store_true", help="on the CPU too, train as on a GPU: bf16 autocast"
    )
    parser.add_argument("--quiet", action="store_true", help="print evaluations only")
    parser.add_argument("--dry", action="store_true", help="accept an untrained result: to try the script")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
