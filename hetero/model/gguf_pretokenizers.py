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
_HAN = "[一-龥぀-ゟ゠-ヿ]+"
# Letters that have a case.
_ALPHABETS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼ"
    "ιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
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
    ("deepseek-llm",): Way((r"[\r\n]", rf"\s?[{_ALPHABETS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
                            "[一-龥ࠀ-一가-퟿]+", r"\p{N}+")),
    ("deepseek-coder",): Way((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
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
    ("youtu",): Way((
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        _cased(r"\p{N}", f"{_SUFFIXES}?")), whole=True),
    ("exaone-moe",): Way((
        rf"{_SUFFIXES}|{_NO_WORD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ("afmoe",): Way((
        # In threes, counted from the end of a number.
        r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))",
        "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
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
