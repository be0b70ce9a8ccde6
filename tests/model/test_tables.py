"""Tables of embeddings in main memory and on disk: the same logits to the bit, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from typer.testing import CliRunner

from hetero.cli import app
from hetero.core import InputError, MachineError
from hetero.engine.load import Loaded, load_model, prepare
from hetero.engine.request import Request, Result
from hetero.engine.synthetic import load_synthetic
from hetero.hw import memory
from hetero.model.build import choose_class
from hetero.model.gguf_scan import BLOCK_TYPES, FLOAT_TYPES
from hetero.model.gguf_source import GgufSource
from hetero.model.sources import open_source
from hetero.model.tables import StoredTable
from hetero.ops.embedding import disk_tables, host_tables, table_reads
from hetero.ops.watch import dense_bytes
from hetero.store.rows import RowFiles, Run
from hetero.trace import recorder
from tests.engine.played import prompt, scheduler, submit
from tests.model.checkpoints import edit_tensors, write
from tests.model.hf_to_gguf import write as write_gguf
from tests.model.quantised import SCHEMES, write_quantised
from tests.model.quiet import quiet  # noqa: F401  no progress bars
from tests.model.tiny_moe import tiny_config, tiny_model
from tests.store.test_rowcache import seeded

RULES = """
rules:
  - name: table
    match: {{name: '{name}'}}
    replace: {replace}
  - name: experts
    match: {{class: MoeBlock}}
    replace: {{op: moe, experts: {{format: f32}}}}
    optional: true
  - name: the rest
    match: {{name: '.*'}}
    replace: {{op: keep}}
"""
NGRAMS = r"\.ngram_embedding$"
IN_RAM, ON_DISK = "{op: embedding, table: {tier: ram}}", "{op: embedding, table: {tier: disk, ram: 4KiB}}"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    yield
    memory.state(None)


def load(folder: Path, replace: str, name: str = NGRAMS, **options: Any) -> Loaded:
    rules = folder.parent / "rules.yaml"
    rules.write_text(RULES.format(name=name, replace=replace))
    return load_model(folder, rules=rules, **options)


def logits(loaded: Loaded, ids: torch.Tensor) -> torch.Tensor:
    """Of a prompt and of four more tokens, one by one."""
    model, count = loaded.runnable.model, ids.shape[1]
    with torch.no_grad():
        first = model(ids[:, : count - 4], use_cache=True)
        rows, cache = [first.logits], first.past_key_values
        for at in range(count - 4, count):
            rows.append(model(ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(rows, dim=1)


def tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 90, (1, 45), generator=generator)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_the_same_logits_from_ram_and_disk(
    tmp_path: Path, generator: torch.Generator, stored: torch.dtype
) -> None:
    """In several files; main memory holds what the files have where that is the same in fewer bytes."""
    folder = tmp_path / "m"
    write("qwen4_exp_text", folder, stored, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ids = tokens(generator)
    for dtype in ("float32", "bfloat16") if stored == torch.bfloat16 else ("float32",):
        kept = load(folder, "{op: keep}", dtype=dtype)
        want = logits(kept, ids)
        ram, disk = load(folder, IN_RAM, dtype=dtype), load(folder, ON_DISK, dtype=dtype)
        assert torch.equal(logits(ram, ids), want)
        assert torch.equal(logits(disk, ids), want)
        held = host_tables(ram.runnable.model)
        assert {one.weight.dtype for one in held} == {stored if dtype == "float32" else torch.bfloat16}
        tables = disk_tables(disk.runnable.model)
        assert len(tables) == len(held) == 2
        assert not disk_tables(ram.runnable.model)
        reads = table_reads(tables)
        assert reads.cache.misses * tables[0].embedding_dim * stored.itemsize == reads.nbytes > 0
        assert reads.cache.hits > 0
        notes = [note for note in disk.notes if "stay on disk" in note]
        assert len(notes) == 2
        assert "A token reads 4 rows" in notes[0]
        assert dense_bytes(disk.runnable.model) == dense_bytes(ram.runnable.model)
        assert sum(one.nbytes for one in tables) <= 2 * 4096


def test_auto_takes_ram_where_there_is_room(tmp_path: Path, generator: torch.Generator) -> None:
    """The shipped rules, and memory that the user states."""
    folder = tmp_path / "m"
    write("qwen4_exp_text", folder, torch.bfloat16)
    ids = tokens(generator)
    roomy = load_model(folder)
    assert not disk_tables(roomy.runnable.model)
    held = sum(memory._status(Path("/"), key) for key in ("RssAnon:", "RssShmem:"))
    memory.state(held + (64 << 20))  # less than a step's workspace
    tight = load_model(folder)
    assert len(disk_tables(tight.runnable.model)) == 2
    assert sum("stay on disk" in note for note in tight.notes) == 2
    assert torch.equal(logits(tight, ids), logits(roomy, ids))
    memory.state(held + 4096)
    with pytest.raises(MachineError, match="; or 'tier: disk' for model"):
        load_model(folder, overrides={"table": "ram"})
    memory.state(None)
    for tier, count in (("disk", 2), ("ram", 0)):
        assert len(disk_tables(load_model(folder, overrides={"table": tier}).runnable.model)) == count


def test_a_table_that_does_more_than_gather(tmp_path: Path, generator: torch.Generator) -> None:
    """gemma4 scales its embeddings."""
    folder = tmp_path / "m"
    write("gemma4_text", folder, torch.bfloat16)
    ids, name = tokens(generator), "embed_tokens_per_layer$"
    want = logits(load(folder, "{op: keep}", name), ids)
    assert torch.equal(logits(load(folder, IN_RAM, name), ids), want)
    on_disk = load(folder, ON_DISK, name)
    assert len(disk_tables(on_disk.runnable.model)) == 1
    assert torch.equal(logits(on_disk, ids), want)


@pytest.mark.parametrize("kind", [name for name in (*FLOAT_TYPES, *BLOCK_TYPES) if name != "F64"])
def test_rows_of_every_gguf_type(tmp_path: Path, generator: torch.Generator, kind: str) -> None:
    """The values of a row read alone are those of the whole tensor."""
    rng = seeded(generator)
    small = {"hidden_size": 256, "vocab_size": 70, "num_hidden_layers": 1, "mlp_only_layers": []}
    chosen = choose_class(tiny_config("qwen3_moe", **small))
    model = tiny_model(chosen.cls, chosen.config, int(rng.integers(1000)))
    kinds = {"token_embd.weight": Kind[kind]}
    write_gguf(model, tmp_path / "m.gguf", "qwen3moe", kind_of=lambda name, values: kinds.get(name))
    with GgufSource(tmp_path / "m.gguf") as source:
        whole = source.read("model.embed_tokens.weight")
        found = source.rows("model.embed_tokens.weight")
    assert found is not None
    table = StoredTable((Run(found.file, "t", found.start, found.rows),), found.row_bytes, found.kind, 256)
    ids = np.unique(rng.integers(0, 70, 20))
    read = np.full((len(ids), found.row_bytes), 0xEE, dtype=np.uint8)
    RowFiles(table.runs, table.row_bytes).read(ids, read)
    got, want = table.decode(torch.from_numpy(read)), whole[torch.from_numpy(ids)]
    assert got.dtype == want.dtype
    same = torch.uint16 if got.itemsize == 2 else torch.int32
    assert torch.equal(got.view(same), want.view(same))  # NaN too
    assert table.decode(torch.from_numpy(read[:0])).shape == (0, 256)


def test_a_gguf_model_with_its_embedding_on_disk(tmp_path: Path, generator: torch.Generator) -> None:
    chosen = choose_class(tiny_config("qwen3_moe", tie_word_embeddings=False))
    model = tiny_model(chosen.cls, chosen.config, 3)
    folder = tmp_path / "g"
    folder.mkdir()
    kinds = {"token_embd.weight": Kind.Q8_0, "output.weight": Kind.Q4_0}
    write_gguf(model, folder / "m.gguf", "qwen3moe", kind_of=lambda name, values: kinds.get(name), split=9)
    first = sorted(folder.glob("*.gguf"))[0]
    ids, name = tokens(generator), "embed_tokens$"
    want = logits(load(first, "{op: keep}", name), ids)
    disk = load(first, ON_DISK, name)
    (table,) = disk_tables(disk.runnable.model)
    assert torch.equal(logits(disk, ids), want)
    ram = load(first, IN_RAM, name)
    assert torch.equal(logits(ram, ids), want)
    (held,) = host_tables(ram.runnable.model)
    assert held.nbytes == table.disk_nbytes == 96 * (64 // 32 * 34)  # in its blocks
    assert not disk_tables(ram.runnable.model)
    done = CliRunner().invoke(
        app, ["rules", "explain", str(folder / "rules.yaml"), str(first), "--json", "--devices", "cpu"]
    )
    assert done.exit_code == 0, done.output
    (line,) = [one for one in json.loads(done.stdout)["modules"] if one["module"].endswith(name.rstrip("$"))]
    assert (line["format"], line["device"], line["bytes"]) == ("q8_0", "cpu", held.nbytes)


def test_a_fault_is_the_error_of_the_request(tmp_path: Path, generator: torch.Generator) -> None:
    folder = tmp_path / "m"
    write("qwen4_exp_text", folder, torch.bfloat16)
    loaded = load(folder, ON_DISK.replace("4KiB", "0"))
    file = folder / "model.safetensors"
    stat = os.stat(file)
    seed = int(torch.randint(100, (), generator=generator))
    with scheduler(loaded.runnable) as engine:
        before = submit(engine, Request(prompt(seed), max_tokens=3)).result().token_ids
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        error = submit(engine, Request(prompt(seed + 1), max_tokens=3)).wait()
        assert isinstance(error, MachineError)
        assert str(file) in str(error)
        assert "ngram_embedding.shard_0.weight cannot be read: it has changed" in str(error)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        after = submit(engine, Request(prompt(seed), max_tokens=3)).wait()
        assert isinstance(after, Result)
        assert after.token_ids == before


def test_reads_are_in_the_trace(tmp_path: Path, generator: torch.Generator) -> None:
    folder = tmp_path / "m"
    write("qwen4_exp_text", folder, torch.bfloat16)
    loaded = load(folder, ON_DISK)
    since = recorder.next_number()
    with recorder.recording(), torch.no_grad():
        loaded.runnable.model(tokens(generator))
    spans = [span for span in recorder.spans(since) if span.lane == "disk"]
    assert sorted(span.layer for span in spans) == [0, 2]
    assert sum(span.nbytes for span in spans) == table_reads(disk_tables(loaded.runnable.model)).nbytes


def test_what_cannot_be_on_disk_is_refused_by_name(tmp_path: Path) -> None:
    def refused(folder: Path, name: str, replace: str = ON_DISK) -> str:
        with pytest.raises(InputError) as caught:
            load(folder, replace, name)
        assert "rules.yaml:" in str(caught.value)
        assert "rule 1 'table'" in str(caught.value)
        return str(caught.value)

    tied = tmp_path / "tied"
    write("gemma4_text", tied)
    assert "embed_tokens shares its table with another module" in refused(tied, r"embed_tokens$")
    folder = tmp_path / "m"
    write("qwen3_moe", folder)
    assert "lm_head is a Linear; 'class: Embedding' in 'match'" in refused(folder, "lm_head$")
    other = tmp_path / "other"
    write("qwen4_exp_text", other, torch.bfloat16)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.ple.ple_embedding.ngram_embedding.shard_1.weight"
        tensors[name] = tensors[name].float()

    edit_tensors(other, change)
    assert "layers.0.ple.ple_embedding.ngram_embedding: its parts are of several types" in refused(
        other, NGRAMS
    )
    auto = load(other, "{op: embedding}")
    assert not disk_tables(auto.runnable.model)


def test_fused_layers_read_their_tokens_embedding_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    write("qwen4_exp_text", folder, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rules = tmp_path / "mine.yaml"
    own = "  - name: mine\n    match: {name: 'embed_tokens$'}\n    replace: {op: embedding}\n"
    rules.write_text(f"extends: qwen-gpu\nrules:\n{own}")
    with pytest.raises(InputError, match="rule 1 'mine': op 'embedding': fused layers read rows of"):
        prepare(folder, rules=rules)
    rules.write_text("extends: qwen-gpu\nvars: {table: disk}\n")
    ready = prepare(folder, rules=rules)
    tiers = [one.options["table"]["tier"] for one in ready.placement.assignments if one.op == "embedding"]
    assert tiers == ["disk"] * 2


def test_a_quantised_matrix_has_no_rows_of_its_own(tmp_path: Path) -> None:
    written = write_quantised(tmp_path / "q", "qwen3_moe", SCHEMES["fp8"])
    source = open_source(written.folder)
    found = {name: source.rows(name) for name in source.tensors}
    assert found["model.embed_tokens.weight"] is not None
    assert found["model.norm.weight"] is None
    assert any(info.format is not None and found[name] is None for name, info in source.tensors.items())
    assert all(source.tensors[name].format is None for name, rows in found.items() if rows is not None)


def test_random_weights_have_tables_too(generator: torch.Generator) -> None:
    config = tiny_config("qwen4_exp_text").to_dict()
    ids = tokens(generator)
    for tier, count in (("auto", 0), ("ram", 0), ("disk", 2)):
        loaded = load_synthetic(config, name="tiny", overrides={"table": tier})
        found = disk_tables(loaded.runnable.model)
        assert len(found) == count
        assert not any(one.path.exists() for one in found)  # nothing is left behind
        assert logits(loaded, ids).isfinite().all()


def test_explain_counts_a_table_where_it_lies(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write("qwen4_exp_text", folder, torch.bfloat16)

    def explained(*more: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["rules", "explain", str(folder), "--json", "--devices", "cpu", *more])
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    ram, disk, auto = (explained("--set", f"table={tier}") for tier in ("ram", "disk", "auto"))
    (table, _) = [line for line in ram["modules"] if line["module"].endswith("ngram_embedding")]
    assert (table["op"], table["device"], table["format"]) == ("embedding", "cpu", "bfloat16")
    lines = [line for line in disk["modules"] if line["module"] == table["module"]]
    assert [(line["op"], line["device"], line["bytes"]) for line in lines] == [
        ("embedding", "disk", table["bytes"]),
        ("RAM of embedding", "cpu", table["bytes"]),
    ]
    assert auto["totals"] == ram["totals"]
    assert any("'tier: auto' leaves" in note for note in auto["notes"])
    assert not any("'tier: auto'" in note for note in ram["notes"])
