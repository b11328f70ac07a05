"""Numbers in running text and LaTeX, read exactly."""

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

Number = Decimal | Fraction
LARGEST_EXPONENT = 10_000
"""Beyond it nobody's answer lies, and what compares such numbers exactly never ends."""

PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+(?!\w))?"
TERM = r"\s*(?:\{{\s*(?P<{0}>-?\s*" + PLAIN.replace("{", "{{").replace("}", "}}") + r")\s*\}}|(?P<{0}_digit>[0-9]))"
"""Of \\frac: a number in braces, or one digit."""
NUMBER = re.compile(
    rf"(?:(?P<before>[0-9]+)\s*)?\\[cdt]?frac{TERM.format('over')}{TERM.format('under')}"
    r"|(?<![/0-9.,])(?:(?P<whole>[0-9]+) )?(?P<numerator>[0-9]+)\s?/\s?(?P<denominator>[0-9]+)(?!\s?/|[0-9.]*[0-9])"  # and no date
    rf"|(?P<plain>{PLAIN})")
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
SIGN_REACH = 32
"""Characters before a number in which its sign is looked for."""
CURRENCY = "$€£¥\\"
OPERAND = re.compile(r"(?:[0-9)\]}%]|(?<![A-Za-z])[A-Za-z])$")
"""What stands before a minus that subtracts, with spaces around it: a number, a bracket, a variable."""


def last_number(text: str) -> Number | None:
    """The last number of the last \\boxed{}, or of the text without one; None where there is none, or one that nobody can write out.

    Thousands separators count when they part groups of three digits; a final period, a unit or a bracket after the number does not
    matter. A sign may stand before a currency sign or a space, and must not subtract: "3-5" ends in 5, "= - 5" and "-$5" in -5. Fractions
    are one number, in LaTeX or with a slash ("1 1/2" is 1.5, as is "1\\frac12"), dates are several. Exponents ("1e3") are read.
    """
    found = numbers(text)
    return found[-1] if found else None


def numbers(text: str) -> list[Number | None]:
    """All numbers of the last \\boxed{}, or of the text without one; None in the place of one that nobody can write out."""
    held = boxed(text)
    text = text if held is None else held
    text = text.replace("\u2212", "-").replace("\u2013", "-").replace("{,}", ",")
    return [_value(text, match) for match in NUMBER.finditer(text)]


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, None without one that is closed."""
    boxes = {match.end() for match in BOX.finditer(text)}
    opened, last = [], (-1, -1)
    for brace in re.finditer("[{}]", text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and (start := opened.pop()) in boxes:
            last = max(last, (start, brace.start()))
    return None if last[0] < 0 else text[last[0]:last[1]]


def _value(text: str, match: re.Match) -> Number | None:
    sign = -1 if _negative(text[max(0, match.start() - SIGN_REACH):match.start()]) else 1
    if match["plain"]:
        return _decimal(match["plain"], sign)
    over = _decimal(match["over"] or match["over_digit"] or match["numerator"])
    under = _decimal(match["under"] or match["under_digit"] or match["denominator"])
    whole = _decimal(match["before"] or match["whole"] or "0")
    if over is None or whole is None or not under:
        return None
    return sign * (Fraction(whole) + Fraction(over) / Fraction(under))


def _decimal(digits: str, sign: int = 1) -> Decimal | None:
    try:
        number = Decimal("".join(digits.replace(",", "").split()))
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
