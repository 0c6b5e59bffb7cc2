"""Numbers as people read them: on the screen and in the report."""

import math

BARS = "▁▂▃▄▅▆▇█"


def number(value: int | float | None) -> str:
    """Write a number in four digits or as a whole one with separators; nothing for None.

    >>> number(0.98765), number(0.00001234), number(1234567), number(1234567.8), number(12.0)
    ('0.9877', '1.23e-5', '1,234,567', '1,234,568', '12')
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(float(value))
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value != 0 and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def share(value: int | float | None) -> str:
    """Write a share of one in per cent; nothing for None.

    >>> share(0.12345), share(0.9875), share(1.0), share(0.0)
    ('12.3 %', '98.8 %', '100 %', '0 %')
    """
    if value is None:
        return ""
    return f"{100 * value:.1f}".removesuffix(".0") + " %"


def span(seconds: int | float) -> str:
    """Write a time.

    >>> span(0.0421), span(7.26), span(93), span(7384), span(200000)
    ('42 ms', '7.3 s', '1 min 33 s', '2 h 03 min', '2 d 7 h')
    """
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(count: int | float | None) -> str:
    """Write a number of bytes; nothing for None.

    >>> size(512), size(1536), size(3.5 * 2**30)
    ('512 B', '1.5 KiB', '3.5 GiB')
    """
    if count is None:
        return ""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(math.log2(max(1, count)) // 10)))
    return f"{count / 1024**power:.3g} {units[power]}"
