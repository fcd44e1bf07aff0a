"""Options of a transcription, with openai-whisper's defaults and meaning; the languages that Whisper knows.

Light to import: tab completion imports it.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal, get_args

from edgespec.decoding.choices import Rule
from edgespec.errors import UsageError, check_number, check_text, whole_number

SpeechTask = Literal["transcribe", "translate"]
"""The text in the language that is spoken, or in English."""

TranscriptFormat = Literal["txt", "srt", "vtt", "json"]
"""A line for each segment, subtitles, or one JSON object."""

DEFAULT_MODEL = "whisper-base"
"""The Whisper model to use if none is named."""


LANGUAGES = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian", "ko": "korean",
    "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish", "pl": "polish", "ca": "catalan",
    "nl": "dutch", "ar": "arabic", "sv": "swedish", "it": "italian", "id": "indonesian", "hi": "hindi",
    "fi": "finnish", "vi": "vietnamese", "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay",
    "cs": "czech", "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian", "la": "latin",
    "mi": "maori", "ml": "malayalam", "cy": "welsh", "sk": "slovak", "te": "telugu", "fa": "persian",
    "lv": "latvian", "bn": "bengali", "sr": "serbian", "az": "azerbaijani", "sl": "slovenian",
    "kn": "kannada", "et": "estonian", "mk": "macedonian", "br": "breton", "eu": "basque", "is": "icelandic",
    "hy": "armenian", "ne": "nepali", "mn": "mongolian", "bs": "bosnian", "kk": "kazakh", "sq": "albanian",
    "sw": "swahili", "gl": "galician", "mr": "marathi", "pa": "punjabi", "si": "sinhala", "km": "khmer",
    "sn": "shona", "yo": "yoruba", "so": "somali", "af": "afrikaans", "oc": "occitan", "ka": "georgian",
    "be": "belarusian", "tg": "tajik", "sd": "sindhi", "gu": "gujarati", "am": "amharic", "yi": "yiddish",
    "lo": "lao", "uz": "uzbek", "fo": "faroese", "ht": "haitian creole", "ps": "pashto", "tk": "turkmen",
    "nn": "nynorsk", "mt": "maltese", "sa": "sanskrit", "lb": "luxembourgish", "my": "myanmar",
    "bo": "tibetan", "tl": "tagalog", "mg": "malagasy", "as": "assamese", "tt": "tatar", "haw": "hawaiian",
    "ln": "lingala", "ha": "hausa", "ba": "bashkir", "jw": "javanese", "su": "sundanese", "yue": "cantonese",
}  # fmt: skip
"""The name of each language by its code."""

# Other names: the language's own, its code of three letters, and what else is in use; _ for a space.
_OTHER_NAMES = {
    "en": "eng", "zh": "中文 汉语 漢語 普通话 普通話 国语 國語 mandarin zho chi cmn", "de": "deutsch deu ger",
    "es": "español castellano castilian spa", "ru": "русский rus", "ko": "한국어 조선말 kor",
    "fr": "français fra fre", "ja": "日本語 jpn", "pt": "português por", "tr": "türkçe tur",
    "pl": "polski pol", "ca": "català valencian valencià cat", "nl": "nederlands flemish vlaams nld dut",
    "ar": "العربية ara arb", "sv": "svenska swe", "it": "italiano ita", "id": "bahasa_indonesia ind in",
    "hi": "हिन्दी हिंदी hin", "fi": "suomi fin", "vi": "tiếng_việt vie", "he": "עברית heb iw",
    "uk": "українська ukr", "el": "ελληνικά ell gre", "ms": "bahasa_melayu melayu msa may",
    "cs": "čeština česky ces cze", "ro": "română moldavian moldovan ron rum mo", "da": "dansk dan",
    "hu": "magyar hun", "ta": "தமிழ் tam", "no": "norsk bokmål norsk_bokmål nb nob nor",
    "th": "ไทย ภาษาไทย tha", "ur": "اردو urd", "hr": "hrvatski hrv", "bg": "български bul",
    "lt": "lietuvių lit", "la": "latina lat", "mi": "te_reo_māori māori mri mao", "ml": "മലയാളം mal",
    "cy": "cymraeg cym wel", "sk": "slovenčina slovensky slk slo", "te": "తెలుగు tel",
    "fa": "فارسی farsi fas per", "lv": "latviešu lav", "bn": "বাংলা bangla bengali ben",
    "sr": "српски srpski srp", "az": "azərbaycanca aze", "sl": "slovenščina slv", "kn": "ಕನ್ನಡ kan",
    "et": "eesti est", "mk": "македонски mkd mac", "br": "brezhoneg bre", "eu": "euskara eus baq",
    "is": "íslenska isl ice", "hy": "հայերեն hye arm", "ne": "नेपाली nep", "mn": "монгол mon",
    "bs": "bosanski bos", "kk": "қазақша қазақ kaz", "sq": "shqip sqi alb", "sw": "kiswahili swa",
    "gl": "galego glg", "mr": "मराठी mar", "pa": "ਪੰਜਾਬੀ panjabi pan", "si": "සිංහල sinhalese sin",
    "km": "ភាសាខ្មែរ ខ្មែរ cambodian khm", "sn": "chishona sna", "yo": "yorùbá yor", "so": "soomaali som",
    "af": "afr", "oc": "occitan oci", "ka": "ქართული kat geo", "be": "беларуская bel", "tg": "тоҷикӣ tgk",
    "sd": "سنڌي snd", "gu": "ગુજરાતી guj", "am": "አማርኛ amh", "yi": "ייִדיש יידיש yid ji",
    "lo": "ລາວ ພາສາລາວ laotian", "uz": "o'zbekcha o'zbek ozbek uzb", "fo": "føroyskt fao",
    "ht": "kreyòl_ayisyen haitian kreyol hat", "ps": "پښتو pushto pus", "tk": "türkmençe tuk",
    "nn": "norwegian_nynorsk norsk_nynorsk nno", "mt": "malti mlt", "sa": "संस्कृतम् san",
    "lb": "lëtzebuergesch letzeburgesch ltz", "my": "မြန်မာ မြန်မာဘာသာ burmese mya bur",
    "bo": "བོད་སྐད་ bod tib", "tl": "filipino fil tgl", "mg": "mlg", "as": "অসমীয়া asm", "tt": "татарча tat",
    "haw": "'ōlelo_hawai'i olelo_hawaii", "ln": "lingála lin", "ha": "hau", "ba": "башҡортса bak",
    "jw": "basa_jawa jawa jv jav", "su": "basa_sunda sunda sun", "yue": "粵語 粤语 廣東話 广东话",
}  # fmt: skip

WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that write words without spaces between them."""


def _plain(name: str) -> str:
    letters = unicodedata.normalize("NFKD", " ".join(name.replace("_", " ").split()).casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


_CODES = {code: code for code in LANGUAGES} | {
    _plain(name): code for code, names in _OTHER_NAMES.items() for name in names.split()
}
_CODES |= {name: code for code, name in LANGUAGES.items()}


def language_code(name: str) -> str | None:
    """Return the code of a language, given by code, region or name in English or itself; None for "auto".

    Raises UsageError, which offers the nearest names.
    """
    word = _plain(name)
    if word == "auto":
        return None
    if word in _CODES:
        return _CODES[word]
    parts = word.partition(".")[0].replace("-", " ").split()  # en-US, en_US.UTF-8, zh-Hans-CN
    if len(parts) > 1 and len(parts[0]) <= 3 and parts[0] in _CODES:
        return "yue" if parts[1] == "yue" else _CODES[parts[0]]
    from edgespec.models.registry import nearest

    alike = nearest(word, [*LANGUAGES.values(), *LANGUAGES])
    alike = alike or "; give a name or a code, such as german or de, or auto"
    raise UsageError(f"Whisper knows no such language{alike}", field="language", value=name)


TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures tried one after the other, until a window's text is good enough."""

MAX_BEAM = 15
"""Most beams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOptions:
    """The options of a transcription. Raises UsageError, which names the field."""

    language: str | None = None
    """Language that is spoken, by its code, a region or a name ("en", "en-US", "English"), which becomes the
    code; None or "auto": as detected in the first window."""
    task: SpeechTask = "transcribe"
    prompt: str | None = None
    """Text that stands before the first window's: names and words to expect, spelling, style."""
    condition: bool = True
    """Whether a window is given the text before it, as long as that seems right."""
    temperatures: tuple[float, ...] = TEMPERATURES
    max_compression: float | None = 2.4
    """Text that can be compressed further than this repeats itself; the next temperature is tried."""
    min_logprob: float | None = -1.0
    """Mean logprob of a token below which the next temperature is tried."""
    max_no_speech: float | None = 0.6
    """Probability that nobody speaks, above which a window with a low logprob is left out."""
    beam: int | None = None
    """Beams of the search at temperature 0; None: greedy."""
    patience: float = 1.0
    """Texts that the search waits for, times the number of beams."""
    length_penalty: float | None = None
    """Exponent of Google's length penalty, 0 to 1; None: the mean logprob decides between beams."""
    timestamps: bool = True
    words: bool = False
    """Whether each word gets its times."""
    max_initial_timestamp: float | None = 1.0
    """Latest first timestamp of a window, in seconds."""
    seed: int | None = None
    """Seed of temperatures above 0. Fallbacks always have one (0), so that a file gives the same text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", tuple(self.temperatures))
        object.__setattr__(self, "language", language_code(self.language) if self.language else None)
        if self.task not in get_args(SpeechTask):
            problem = f"must be one of {', '.join(get_args(SpeechTask))}"
            raise UsageError(problem, field="task", value=self.task)
        for name in ("beam", "seed"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(name, given))
        for name in ("language", "prompt"):
            if (given := getattr(self, name)) is not None:
                check_text(name, given)
        if not self.temperatures:
            raise UsageError("needs one temperature or more", field="temperatures")
        for temperature in self.temperatures:
            check_number("temperatures", temperature)
            if not (temperature == 0 or 1e-3 <= temperature <= 5.0):
                raise UsageError("must be 0, or 0.001 to 5", field="temperatures", value=temperature)
        beams, penalty = self.beam, self.length_penalty
        for name, value, good, wanted in (
            ("beam", beams, beams is None or 1 <= beams <= MAX_BEAM, f"1 to {MAX_BEAM}"),
            ("patience", self.patience, 0.0 < self.patience <= 10.0, "above 0 and at most 10"),
            ("length_penalty", penalty, penalty is None or 0.0 <= penalty <= 1.0, "0 to 1"),
            ("seed", self.seed, self.seed is None or 0 <= self.seed < 1 << 32, "0 to 2^32 - 1"),
        ):
            if not good:
                raise UsageError(f"must be {wanted}", field=name, value=value)
        if self.words and not self.timestamps:
            raise UsageError("needs timestamps", field="words")

    def rule(self, temperature: float) -> Rule:
        """Return the rule that accepts drafts: "block" only where nothing has to be repeatable."""
        is_asked_for = self.temperatures == (temperature,)
        return "block" if temperature > 0 and is_asked_for and self.seed is None else "match"
