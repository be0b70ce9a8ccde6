"""How texts are cut before byte pairs are merged, by the names that GGUF files give to the ways.

Each way is a sequence of patterns; what one matches, and what it leaves between its matches, is cut further
by the next. The patterns are those of the models' own tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_NO_WORD = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}", others: str = r"\p{L}\p{N}") -> str:
    """Words with a sign before them, English suffixes apart, digits by ``digits``."""
    return rf"{_SUFFIXES}|{_NO_WORD}[{letters}]+|{digits}| ?[^\s{others}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, suffixes: str, upper: str = _UPPER, lower: str = _LOWER, more: str = "/") -> str:
    """As ``_words``, cut before capitals too."""
    word = rf"{_NO_WORD}[{upper}]*[{lower}]+{suffixes}|{_NO_WORD}[{upper}]+[{lower}]*{suffixes}"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{more}]*|{_SPACES}"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    rf"{_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# Letters that have a case, but those of mathematics and of Georgian.
_ALPHABETS = r"[\p{Lu}\p{Ll}\p{Lt}]&&" + "[^\u10d0-\u10ff\U0001d400-\U0001d7ff]"
_DEEPSEEK_SIGNS = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Scripts without spaces between words, as afmoe's tokenizer lists them.
_SPACELESS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_NOT_HAN = r"&&[^\p{Han}]"


@dataclass(frozen=True, slots=True)
class Way:
    """How texts are cut. ``whole``: a piece that is a token is one, whatever the merges make of it.

    ``bos``: whether a begin-of-text token goes first where the file does not say.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False


_BY_NAMES: dict[tuple[str, ...], Way] = {
    ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "gigachat", "mellum", "exaone4",
     "modern-bert", "a.x-4.0"): Way((_GPT2,)),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"):
        Way((_LLAMA3,), whole=True, bos=True),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): Way((_LLAMA3,)),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open",
     "grok-2"): Way((_QWEN2,)),
    ("qwen35",): Way((_words(r"\p{N}", r"\p{L}\p{M}", r"\p{L}\p{M}\p{N}"),)),
    ("deepseek-llm",): Way((r"[\r\n]", rf"\s?[{_ALPHABETS}]+", _DEEPSEEK_SIGNS, r"\s+$", _EAST_ASIAN,
                            r"\p{N}+")),
    ("deepseek-coder",): Way((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): Way((r"\p{N}{1,3}", _HAN, _DEEPSEEK3)),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"):
        Way((r"\p{N}", _GPT2)),
    ("tekken",): Way((_cased(r"\p{N}", ""),), whole=True, bos=True),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): Way((_cased(r"\p{N}{1,3}", f"{_SUFFIXES}?"),)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): Way((
        rf"'(?i:[sdmt]|ll|ve|re)|{_NO_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]"
        r"|\s+(?!\S)|\s+",)),
    ("seed-coder",): Way((
        rf"{_SUFFIXES}|{_NO_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    ("youtu",): Way((_YOUTU, _cased(r"\p{N}", f"{_SUFFIXES}?")), whole=True),
    ("exaone-moe",): Way((
        rf"{_SUFFIXES}|{_NO_WORD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ("afmoe",): Way((
        # In threes, counted from the end of a number.
        r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))",
        _SPACELESS,
        _DEEPSEEK3)),
    ("kimi-k2",): Way((
        r"[\p{Han}]+|"
        + _cased(r"\p{N}{1,3}", f"{_SUFFIXES}?", _UPPER + _NOT_HAN, _LOWER + _NOT_HAN, ""),), whole=True),
    ("falcon",): Way((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    # Also where a file names none.
    ("default",): Way((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}  # fmt: skip

WAYS: dict[str, Way] = {name: way for names, way in _BY_NAMES.items() for name in names}
"""Value of ``tokenizer.ggml.pre`` -> the way."""
