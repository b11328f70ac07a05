"""Numbers in running text and LaTeX, read exactly."""

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

Number = Decimal | Fraction
LARGEST_EXPONENT = 10_000
"""Beyond it nobody's answer lies, and what compares such numbers exactly never ends."""

PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+(?!\w))?"
NUMBER = re.compile(
    r"\\[dt]?frac\s*\{\s*(?P<over>[0-9]+)\s*\}\s*\{\s*(?P<under>[0-9]+)\s*\}"
    r"|(?<![/0-9.,])(?:(?P<whole>[0-9]+) )?(?P<numerator>[0-9]+)\s?/\s?(?P<denominator>[0-9]+)(?!\s?/|[0-9.]*[0-9])"  # and no date
    rf"|(?P<plain>{PLAIN})")
CURRENCY = "$€£¥\\"
OPERAND = re.compile(r"(?:[0-9)\]}%]|(?<![A-Za-z])[A-Za-z])$")
"""What stands before a minus that subtracts, with spaces around it: a number, a bracket, a variable."""


def last_number(text: str) -> Number | None:
    """The last number of the last \\boxed{}, or of the text without one; None where there is none, or one that nobody can write out.

    Thousands separators count when they part groups of three digits; a final period, a unit or a bracket after the number does not
    matter. A sign may stand before a currency sign or a space, and must not subtract: "3-5" ends in 5, "= - 5" and "-$5" in -5. Fractions
    are one number, in LaTeX or with a slash ("1 1/2" is 1.5), dates are several. Exponents ("1e3") are read.
    """
    found = numbers(boxed(text) or text)
    return found[-1] if found else None


def numbers(text: str) -> list[Number | None]:
    text = text.replace("\u2212", "-").replace("{,}", ",")
    return [_value(text, match) for match in NUMBER.finditer(text)]


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, None without one that is closed."""
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if not depth:
                return text[start:end]
    return None


def _value(text: str, match: re.Match) -> Number | None:
    sign = -1 if _negative(text[:match.start()]) else 1
    if match["plain"]:
        return _decimal(match["plain"], sign)
    over, under = match["over"] or match["numerator"], match["under"] or match["denominator"]
    if max(len(over), len(under)) > 4000 or not int(under):  # Python writes out integers of 4300 digits at most
        return None
    return sign * (int(match["whole"] or 0) + Fraction(int(over), int(under)))


def _decimal(digits: str, sign: int) -> Decimal | None:
    try:
        number = Decimal(digits.replace(",", ""))
    except InvalidOperation:  # an exponent beyond what a Decimal holds
        return None
    if number and abs(number.adjusted()) > LARGEST_EXPONENT:
        return None
    return number.copy_negate() if sign < 0 else number


def _negative(left: str) -> bool:
    """Whether a minus at the end of `left`, what stands before the number, is its sign."""
    before = left.rstrip(" \t" + CURRENCY)
    if not before.endswith("-"):
        return False
    spaced, before = any(c in " \t" for c in left[len(before):]), before[:-1]
    subtracts = OPERAND.search(before.rstrip()) if spaced else re.search(r"[\w)\]}]$", before)
    return not subtracts
