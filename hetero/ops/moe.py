"""Op ``moe``: the whole MoE block, so that the shared expert runs while the routed experts are away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hetero.core import ExpertSpec, InputError
from hetero.formats import BLOCK_ROWS
from hetero.model.build import is_experts
from hetero.model.moe_types import expert_spec
from hetero.ops.experts import CpuExpertsOp, Pending, make_backend, stated_format
from hetero.ops.linear import Linear
from hetero.ops.recipes import RECIPES, Recipe
from hetero.ops.watch import layer_of
from hetero.registry import register_op
from hetero.rules.options import DEFAULT_FORMAT


def _options_of(experts: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of one experts module, whose formats may have come from the checkpoint."""
    formats = options.get("formats", {}).get(experts)
    return options if formats is None else {**options, "format": formats[0], "down_format": formats[1]}


@register_op("moe")
class MoeBlock(nn.Module):
    """A block of transformers with its own order: route, submit, shared expert, collect, combine.

    Takes over the block's children, parameters and buffers: names in the tree stay what they were, and what
    the loader puts into the old block is seen here.
    """

    def __init__(self, block: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self._modules = block._modules
        self._parameters = block._parameters
        self._buffers = block._buffers
        self.recipe = recipe
        self.block_class = type(block).__name__
        # May change the choice of experts: (ids [T, k], weights [T, k]) -> those that are used instead.
        self.routing: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
        # Told this block's input, as its router takes it, to guess the next layer's experts: ``ops.guess``.
        self.following: Callable[[torch.Tensor], None] | None = None
        self.training = block.training

        def value(name: str) -> Any:
            return getattr(block, name, None) if name else None

        self._scale = value(recipe.scale)
        self._average = value(recipe.strategy) == "average"
        self._float32_sum = bool(value(recipe.float32_sum))
        self._shared = next((name for name in recipe.shared if value(name) is not None), "")
        self._shared_gate = recipe.shared_gate if value(recipe.shared_gate) is not None else ""
        # The block may have the argument and its router not: DeepSeek V4 hashes tokens in some layers only.
        self._router_kwargs = dict(recipe.router_kwargs)
        if not getattr(block, "is_hash", True):
            self._router_kwargs.pop("input_ids", None)

    @staticmethod
    def from_module(
        module: nn.Module, *, name: str, config: Any, device: str, options: Mapping[str, Any]
    ) -> nn.Module:
        """Give every experts module below a backend and take over the blocks that are known.

        A block of an unknown class, or a decoder layer that holds experts itself, keeps its own code; its
        experts are replaced in place. Raises InputError where ``module`` holds no routed experts.
        """
        sites = [path for path, child in module.named_modules() if is_experts(child)]
        if not sites:
            raise InputError(
                f"op 'moe' was given {name or 'the whole model'} ({type(module).__name__}), "
                "which holds no routed experts of transformers' experts interface"
            )
        if options.get("format"):
            _pack_linears(module, sites, name=name, config=config, device=device, fmt=options["format"])
        experts_options = dict(options.get("experts", {}))
        # With the block on a GPU, the CPU's work and the shared expert's run side by side. On the CPU alone
        # they would share its cores.
        overlap = bool(experts_options.get("overlap", device != "cpu"))
        for path in sites:
            block_path, _, leaf = path.rpartition(".")
            block = module.get_submodule(block_path) if block_path else module
            experts = module.get_submodule(path)
            spec = expert_spec(experts, config)
            full = f"{name}.{path}" if path else name
            setattr(block, leaf, _experts(spec, _options_of(full, experts_options), experts, overlap, full))
            recipe = RECIPES.get(type(block).__name__)
            if recipe is None or leaf != "experts":
                continue
            if not block_path:
                module = MoeBlock(block, recipe)
            else:
                parent_path, _, block_leaf = block_path.rpartition(".")
                parent = module.get_submodule(parent_path) if parent_path else module
                setattr(parent, block_leaf, MoeBlock(block, recipe))
        return module

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [batch, sequence, hidden] or [tokens, hidden] -> the same, or the block's tuple."""
        recipe = self.recipe
        if args:  # the blocks take at most one argument besides the hidden states
            kwargs |= dict(zip(recipe.router_kwargs.values(), args, strict=False))
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        routed = self._route(hidden_states if recipe.router_unflattened else x, kwargs)
        experts: Any = self.experts
        ids, weights = (routed[2], routed[1]) if self.routing is None else self.routing(routed[2], routed[1])
        inputs, slots = self._through(recipe.before, x), 1
        if recipe.weighs_inputs:  # each of a token's experts has an input of its own
            slots = ids.shape[1]
            inputs = (inputs.unsqueeze(1) * weights.to(inputs.dtype).unsqueeze(-1)).flatten(0, 1)
            ids, weights = ids.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1)
        if self.following is not None:
            experts.backend.then = partial(self.following, hidden_states if recipe.router_unflattened else x)
        pending: Pending = experts.submit(inputs, ids, weights)
        shared = self._shared_output(x, routed)
        out = self._through(recipe.after, pending.collect())
        out = out if slots == 1 else out.view(-1, slots, out.shape[-1]).sum(dim=1)
        out = self._combine(out, shared)
        return recipe.returns(out.reshape(hidden_states.shape), routed)

    @property
    def routes_by_input(self) -> bool:
        """Whether the router takes nothing else of a step than the block's input."""
        return not self._router_kwargs

    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        """The router's choice for an input as it takes it: ids [T, k], the likeliest first."""
        ids: torch.Tensor = self._route(x, {})[2]
        return ids

    def _route(self, x: torch.Tensor, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The router's (logits, weights [T, k], ids [T, k], ...)."""
        recipe = self.recipe
        extra = [getattr(self, name, None) for name in recipe.router_attrs]
        named = {name: kwargs.get(source) for name, source in self._router_kwargs.items()}
        router = getattr(self, recipe.router)
        routed: tuple[Any, ...] = router(x, *extra, **named)
        return routed if recipe.choice is None else recipe.choice(router, routed)

    def _through(self, names: tuple[str, ...], x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = getattr(self, name)(x)
        return x

    def _shared_output(self, x: torch.Tensor, routed: tuple[Any, ...]) -> torch.Tensor | None:
        if not self._shared:
            return None
        named = {name: routed[index] for name, index in self.recipe.shared_kwargs.items()}
        out: torch.Tensor = getattr(self, self._shared)(x, **named)
        if self._shared_gate:
            out = torch.sigmoid(getattr(self, self._shared_gate)(x)) * out
        return out

    def _combine(self, out: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        if self._scale is not None:
            out = out * self._scale
        if shared is not None:
            out = (out.float() + shared.float()).to(out.dtype) if self._float32_sum else out + shared
            if self._average:
                out = out / 2
        return getattr(self, self.recipe.norm)(out) if self.recipe.norm else out

    def extra_repr(self) -> str:
        return self.block_class


def _pack_linears(
    block: nn.Module, sites: list[str], *, name: str, config: Any, device: str, fmt: str
) -> None:
    """Linear layers of the block that are no experts, but for gates of a few outputs."""
    for path, child in list(block.named_modules()):
        if type(child) is not nn.Linear or child.out_features < BLOCK_ROWS:
            continue
        if any(path.startswith(f"{site}.") for site in sites):
            continue
        parent, _, leaf = path.rpartition(".")
        packed = Linear.from_module(
            child, name=f"{name}.{path}", config=config, device=device, options={"format": fmt}
        )
        setattr(block.get_submodule(parent) if parent else block, leaf, packed)


def _experts(
    spec: ExpertSpec, options: Mapping[str, Any], original: nn.Module, overlap: bool, name: str
) -> nn.Module:
    """The operator in place of one experts module."""
    layer = layer_of(name)
    device = options.get("device", "cpu")
    if device == "cpu":
        backend = make_backend(spec, options, name, layer)
        return CpuExpertsOp(spec, backend, original, overlap=overlap, layer=layer)
    try:
        from hetero.ops.gpu.op import GpuExpertsOp
    except ModuleNotFoundError as error:
        raise InputError(
            f"experts on {device} need the package {error.name}: pip install {error.name}"
        ) from None
    fmt = stated_format(options.get("format", DEFAULT_FORMAT))
    down = stated_format(options["down_format"]) if "down_format" in options else fmt
    return GpuExpertsOp(spec, fmt, device, down, layer=layer)
