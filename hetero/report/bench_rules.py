"""The rule file of a benchmark on a GPU: what its options say, as rules that a person can read."""

from __future__ import annotations

from dataclasses import dataclass

_HEAD = """\
description: A benchmark with {what}.
models: any
rules:
  - name: n-gram table
    match: {{name: '\\.ngram_embedding$'}}
    replace: {{op: keep, device: cpu}}
    optional: true
  - name: routed experts
    match: {{class: MoeBlock}}
    replace:
      op: moe
      device: cuda:0
      experts: {{device: cpu, format: "{experts}", numa: "off"{tiers}}}
{kwargs}"""

_EMBEDDING = """\
  - name: embedding, of which kernels read rows in place
    match: {name: '(^|\\.)embed_tokens$'}
    replace: {op: keep, device: cpu}
    optional: true
"""

_FUSED = """\
  - name: fused layers
    match: {class: '*DecoderLayer'}
    replace: {op: fused, device: cuda:0}
"""

_LINEAR = """\
  - name: linear layers
    match: {{class: Linear}}
    replace: {{op: linear, device: cuda:0, kwargs: {{format: {dense}}}}}
"""

_REST = """\
  - name: everything else
    match: {name: '.*'}
    replace: {op: keep, device: cuda:0}
"""

DENSE = {"bfloat16": None, "int8": "int8", "int4": "int4"}
"""Word of ``--dense`` -> format of op ``linear``."""


@dataclass(frozen=True, slots=True)
class GpuRules:
    """``experts``: their format. ``dense``: of DENSE. ``cache`` and ``share`` as in a rule. ``fused``: layers
    as one graph, else transformers' modules. ``defer``: as in a rule. ``tied``: the embedding
    is the head too, and on the GPU."""

    experts: str
    dense: str = "int8"
    cache: str = "auto"
    share: str = "auto"
    fused: bool = True
    defer: int = 0
    tied: bool = False

    def text(self) -> str:
        """As a YAML file."""
        fmt = DENSE[self.dense]
        tiers = f', cache: "{self.cache}", share: {self.share}' if self.fused else ""
        tiers += f", defer: {self.defer}" if self.defer else ""
        kwargs = f"      kwargs: {{format: {fmt}}}\n" if fmt else ""
        what = f"experts {self.experts}, dense layers {self.dense}"
        parts = [_HEAD.format(what=what, experts=self.experts, tiers=tiers, kwargs=kwargs)]
        if self.fused and not self.tied:
            parts.append(_EMBEDDING)
        if fmt:
            parts.append(_LINEAR.format(dense=fmt))
        if self.fused:
            parts.append(_FUSED)
        return "".join([*parts, _REST])
