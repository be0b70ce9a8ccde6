"""Steps of a model: token ids in, logits of the last position out, the caches carried along.

The cache is whatever the model's own forward makes: pages of keys and values, sliding windows, recurrent and
convolution states. The engine passes it on and never looks inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hetero.config import settings
from hetero.engine.sample import Scored
from hetero.kv.prefix import Copies, Keeper
from hetero.model.caches import copied, copyable, cuttable, host_bytes
from hetero.model.rows import RowsModel, takes_rows

if TYPE_CHECKING:
    from hetero.engine.gpu.plain import PlainGraphs

# For so many rows a step, an expert computes the same for a row whatever the others are.
MOST_ROWS = 16


class AnySequence(Protocol):
    """State of one sequence, as far as requests are concerned; see ``Sequence``."""

    @property
    def length(self) -> int: ...
    @property
    def cache(self) -> Any: ...
    @property
    def keepable(self) -> bool: ...
    @property
    def cuttable(self) -> bool: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def marks(self) -> bool: ...
    def mark(self, at: int, *, spare: bool = False) -> None: ...
    def marked(self) -> list[tuple[int, Any]]: ...
    def begin(self, cache: Any, held: int, used: int, *, own: bool = False) -> None: ...
    def settle(self) -> None: ...
    def kept(self) -> Any: ...
    def given(self) -> Any: ...
    def advance(self, tokens: list[int], foreseen: bool = False) -> Tensor | Scored: ...
    def advance_each(self, tokens: list[int], take: Callable[[int, Tensor], None]) -> Tensor: ...
    def close(self) -> None: ...


class AnyStepper(Keeper, Protocol):
    """What runs sequences; see ``Stepper``."""

    @property
    def together(self) -> bool: ...
    @property
    def shares(self) -> bool: ...
    @property
    def states(self) -> bool: ...
    def shared(self, cache: Any, used: int) -> int: ...
    def needs(self, wanted: Iterable[tuple[Any, int]]) -> int: ...
    def on_shortage(self, give_up: Callable[[], bool]) -> None: ...
    def close(self) -> None: ...
    def start(self) -> AnySequence: ...
    def advance(
        self, sequences: Many[Any], tokens: Many[int], foreseen: bool = False
    ) -> Tensor | list[Scored]: ...


class Stepper(Copies):
    """Runs sequences through a causal language model of transformers' interface.

    ``rows``: make the model able to step several at once, where its type can; ``close`` gives it back.
    ``shares``: whether a sequence that begins from another's tokens holds the same memory, at no cost.
    ``states``: whether sequences are known to have states that can be kept and not cut.
    """

    shares = states = False

    def __init__(self, model: nn.Module, rows: bool = False) -> None:
        self._model = model
        self._rows = RowsModel(model) if rows and takes_rows(model) else None
        accepted = inspect.signature(model.forward).parameters
        # A few recurrent families name their cache differently.
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
        self._fixed: dict[str, Any] = {"use_cache": True, "return_dict": True}
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        if "output_router_logits" in accepted:
            self._fixed["output_router_logits"] = False
        # Ids go to where the embedding is, which need not be where the first parameter is.
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        self._device = embedding.weight.device
        if self._last_only and self._device.type == "cpu":
            # By index, since that copies: with the strides of a slice of the prompt, torch's bfloat16 product
            # with the head takes seconds instead of milliseconds.
            self._last_only = {"logits_to_keep": torch.tensor([-1])}
        self.graphs: PlainGraphs | None = None
        if self._device.type == "cuda" and self._cache_name == "past_key_values" and settings().graphs:
            from hetero.engine.gpu.plain import PlainGraphs  # needs the extension, which others do without

            self.graphs = PlainGraphs(model, self._device, self._fixed | self._last_only)

    @property
    def together(self) -> bool:
        """Whether ``advance`` runs sequences in one pass."""
        return self._rows is not None

    def shared(self, cache: Any, used: int) -> int:
        """Tokens of memory of running sequences that one which begins with ``used`` tokens of a kept cache
        would share."""
        return 0

    def needs(self, wanted: Iterable[tuple[Sequence | None, int]]) -> int:
        """Tokens of keys and values, in whole blocks, for sequences that want so many each."""
        return sum(tokens for _, tokens in wanted)

    def on_shortage(self, give_up: Callable[[], bool]) -> None:
        """``give_up`` has something that is kept given up, where memory for sequences is short; here the
        machine's memory ends, and nobody is asked."""

    def close(self) -> None:
        if self._rows is not None:
            self._rows.release()
            self._rows = None
        if self.graphs is not None:
            self.graphs.close()

    def start(self) -> Sequence:
        """A new, empty sequence."""
        made = Sequence(self._model, self._fixed, self._last_only, self._cache_name, self._device)
        made.graphs = self.graphs
        return made

    def advance(self, sequences: Many[Sequence], tokens: Many[int], foreseen: bool = False) -> Tensor:
        """Logits [n, V] after one token for each of n <= MOST_ROWS sequences, n = 1 unless ``together``.
        ``foreseen`` changes nothing.

        All of them must hold tokens. After an exception they are worth nothing. Under inference mode.
        """
        if len(sequences) == 1 or self._rows is None:
            ((sequence, token),) = zip(sequences, tokens, strict=True)
            return sequence.advance([token]).unsqueeze(0)
        lengths = [sequence.length for sequence in sequences]
        caches = [sequence.cache for sequence in sequences]
        logits = self._rows.step(tokens, lengths, caches, **self._fixed, **self._last_only)
        for sequence in sequences:
            sequence.length += 1
        return logits


class Sequence:
    """State of one sequence; closing or dropping it frees its cache. ``length``: tokens that the cache
    holds. ``marks``: whether its state within a prompt can be told while that is read (``mark``); else
    it is read up to there, and told then."""

    marks = False

    def __init__(
        self,
        model: nn.Module,
        fixed: dict[str, Any],
        last_only: dict[str, Any],
        name: str,
        device: torch.device,
    ) -> None:
        self._model, self._fixed, self._last_only = model, fixed, last_only
        self._name, self._device = name, device
        self.held: Any = None
        self.graphs: PlainGraphs | None = None
        self.length = 0

    @property
    def cache(self) -> Any:
        """In memory of its own. (``held`` may see that of a graph.)"""
        if self.graphs is not None:
            self.graphs.release(self)
        return self.held

    @property
    def keepable(self) -> bool:
        """Whether other sequences may start from this one's cache."""
        return copyable(self.held)

    @property
    def cuttable(self) -> bool:
        """Whether they may start from a shorter beginning of it."""
        return cuttable(self.held)

    @property
    def host_bytes(self) -> int:
        """Bytes of the cache in the machine's memory."""
        return host_bytes(self.held)

    def begin(self, cache: Any, held: int, used: int, *, own: bool = False) -> None:
        """Start from a copy of a cache that holds ``held`` tokens, with the first ``used`` of them; ``own``:
        from the cache itself, which nobody else begins from."""
        with torch.inference_mode():
            self.held = copied(cache, held - used, clone=not own)
        self.length = used

    def settle(self) -> None:
        """Afterwards ``length`` is of all that it holds."""

    def kept(self) -> Any:
        """A copy of the cache."""
        with torch.inference_mode():
            return copied(self.cache)

    def given(self) -> Any:
        """The cache itself: the sequence does not go on."""
        return self.cache

    def mark(self, at: int, *, spare: bool = False) -> None:
        """Tell the state after ``at`` tokens when they are read next. ``spare``: only where there is memory
        that nothing else is in."""
        raise ValueError("has no marks")

    def marked(self) -> list[tuple[int, Any]]:
        """(tokens, what ``begin`` takes) of marks that were read since, once; whoever takes them frees
        them."""
        return []

    def close(self) -> None:
        """Free what it holds; it is used no more."""
        if self.graphs is not None:
            self.graphs.forget(self)
        self.held = None

    def advance(self, tokens: list[int], foreseen: bool = False) -> Tensor:
        """Logits [V] after appending ``tokens`` [n >= 1]. Under inference mode. ``foreseen`` changes
        nothing."""
        if len(tokens) == 1 and self.graphs is not None and self.graphs.serves(self):
            logits = self.graphs.step(self, tokens[0])
            if logits is not None:
                return logits
        return self._forward(tokens, self._last_only)[-1]

    def advance_each(self, tokens: list[int], take: Callable[[int, Tensor], None]) -> Tensor:
        """``advance``, and logits at each of the ``tokens``: ``take`` is given them, rows [n, V] at a time
        from the token of an index on, which it must not keep. Under inference mode."""
        logits = self._forward(tokens, {})
        take(0, logits)
        return logits[-1]

    def _forward(self, tokens: list[int], keep: dict[str, Any]) -> Tensor:
        ids = torch.tensor([tokens], dtype=torch.long, device=self._device)
        output = self._model(input_ids=ids, **{self._name: self.cache}, **self._fixed, **keep)
        self.held = output[self._name]
        self.length += len(tokens)
        logits: Tensor = output.logits
        return logits[0]
