"""Formats of strings as regular expressions. Each matching text is valid; some unusual valid texts do not match."""

_HEX = "[0-9a-fA-F]"
_DATE = (
    r"(\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    r"|(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26]|00)00)-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[-+]([01]\d|2[0-3]):[0-5]\d)"
_SECOND = r"\d+S"
_MINUTE = rf"\d+M({_SECOND})?"
_OF_TIME = rf"T(\d+H({_MINUTE})?|{_MINUTE}|{_SECOND})"
_MONTH = r"\d+M(\d+D)?"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_WORD = f"{_HEX}{{1,4}}"
_IPV6 = "|".join([
    f"({_WORD}:){{7}}{_WORD}",
    f"({_WORD}:){{1,7}}:",
    *(f"({_WORD}:){{1,{7 - n}}}(:{_WORD}){{1,{n}}}" for n in range(1, 7)),
    f":((:{_WORD}){{1,7}}|:)",
])  # fmt: skip


def _domain(least: int, most: int, letters: int) -> str:
    """Return the pattern of names with `least` to `most` dots. letters: the most in each part, not counting its single hyphens."""
    part = rf"[a-zA-Z0-9](-?[a-zA-Z0-9]){{0,{letters - 1}}}"
    return rf"{part}(\.{part}){{{least},{most}}}"


_ATEXT = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3}|0)"
_CHAR = r"([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_NO_COLON = r"([a-zA-Z0-9._~!$&'()*+,;=@-]|%[0-9a-fA-F]{2})"
_OF_NAME = r"([a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{2})"
_HOST = rf"(({_OF_NAME}|:)*@)?({_OF_NAME}+|\[({_IPV6})\])(:{_PORT})?"
_MORE = f"(/{_CHAR}*)"
_AUTHORITY = f"//({_HOST}{_MORE}*|{_MORE}+)"
_ABSOLUTE = f"/({_CHAR}+{_MORE}*)?"
_END = rf"(\?({_CHAR}|[/?])*)?(#({_CHAR}|[/?])*)?"
_URI = rf"[a-zA-Z][a-zA-Z0-9+.-]*:({_AUTHORITY}|{_ABSOLUTE}|{_CHAR}+{_MORE}*){_END}"
_POINTER = "(/([^~/]|~[01])*)*"

FORMATS = {
    name: f"^({pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": rf"P((\d+D|{_MONTH}|\d+Y({_MONTH})?)({_OF_TIME})?|{_OF_TIME}|\d+W)",
        "uuid": "-".join(f"{_HEX}{{{n}}}" for n in (8, 4, 4, 4, 12)),
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "hostname": f"{_domain(0, 3, 31)}|{_domain(4, 7, 15)}",  # at most 253 characters
        "email": rf"{_ATEXT}(\.?{_ATEXT}){{0,31}}@{_domain(1, 3, 23)}",  # at most 254 characters, and 64 before the @
        "uri": _URI,
        "uri-reference": f"{_URI}|({_AUTHORITY}|{_ABSOLUTE}|{_NO_COLON}+{_MORE}*|){_END}",
        "iri": _URI,
        "json-pointer": _POINTER,
        "relative-json-pointer": rf"(0|[1-9]\d*)(#|{_POINTER})",
    }.items()
}
"""RFC 3339 (with appendix A), 4122, 2673, 4291, 1123, 5321 (a name and a domain, without quotes), 3986, 6901."""
