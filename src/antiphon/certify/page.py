"""A certificate as an HTML page. A chart for each kind shows the delay by number of sessions and the objective."""

from __future__ import annotations

from html import escape

from antiphon.admission.certificate import Certificate, CertifiedKind
from antiphon.certify.single_caller import lines_of

WIDTH, HEIGHT, LEFT, BOTTOM = 520, 240, 46, 32

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}
table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0;text-align:left}
svg{max-width:100%;height:auto}.axis{stroke:currentColor;opacity:.4}.goal{stroke:#c33;stroke-dasharray:5 4}
.p95{stroke:#26c;fill:none;stroke-width:2}.p50{stroke:#26c;fill:none;opacity:.45;stroke-width:2}
.held{fill:#26c}.not{fill:#c33}text{fill:currentColor;font-size:12px}
"""


def page(certificate: Certificate) -> str:
    """Return the certificate as a self-contained HTML page."""
    facts = {name: value for name, value in certificate.machine.items() if value}
    about = ", ".join(f"{escape(name)} {escape(str(value))}" for name, value in facts.items()) or escape(
        certificate.url
    )
    body = [
        f"<h1>{escape(certificate.url or 'This machine')}, {escape(certificate.date[:10])}</h1>",
        f"<p>{about}</p><p>Models: {escape(', '.join(certificate.models) or 'unknown')}.</p>",
        "<table><tr><th>kind<th>sessions held<th>objective, p95<th>what is measured</tr>",
    ]
    body += [
        f"<tr><td>{escape(kind)}<td>{found.sessions}{' or more' if found.bounded else ''}"
        f"<td>{found.objective.p95_s:g} s{'' if found.objective.allowed else ' for every turn'}"
        f"<td>{escape(found.objective.delay)}</tr>"
        for kind, found in certificate.kinds.items()
    ]
    body.append("</table>")
    if certificate.mixed is not None:
        body.append(f"<p>Kinds may be mixed up to a load of {certificate.mixed:g}.</p>")
    if certificate.alone:
        rows = "".join(f"<tr><td>{escape(name)}<td>{escape(value)}</tr>" for name, value in lines_of(certificate.alone))
        body.append(f"<h2>One caller alone</h2><table>{rows}</table>")
    body += [f"<h2>{escape(kind)}</h2>{_curve(found)}{_steps(found)}" for kind, found in certificate.kinds.items()]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Certificate</title><style>{_STYLE}</style>"
        + "\n".join(body)
        + "</html>\n"
    )


def _steps(found: CertifiedKind) -> str:
    rows = "".join(
        f"<tr><td>{s.sessions}<td>{_seconds(s.p50_s)}<td>{_seconds(s.p95_s)}<td>{s.turns}<td>{s.failed}"
        f"<td>{'held' if s.met else 'not held'}<td>{f'{s.missed} of {s.units} units missed' if s.units else ''}</tr>"
        for s in found.curve
    )
    return f"<table><tr><th>sessions<th>p50<th>p95<th>turns<th>failed<th><th></tr>{rows}</table>"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _curve(found: CertifiedKind) -> str:
    """Draw the delay by number of sessions as SVG, without steps that have no 95th percentile (too many failures)."""
    steps = [s for s in found.curve if s.p95_s is not None]
    if not steps:
        return "<p>Nothing could be measured.</p>"
    most = max(s.sessions for s in steps)
    top = 1.15 * max([found.objective.p95_s, *(s.p95_s or 0.0 for s in steps)])

    def at(sessions: float, seconds: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 10) * sessions / max(most, 1)
        return round(x, 1), round((HEIGHT - BOTTOM) * (1 - seconds / top), 1)

    def line(name: str, values: list[tuple[float, float]]) -> str:
        points = " ".join(f"{x},{y}" for x, y in values)
        return f'<polyline class="{name}" points="{points}"/>'

    goal = at(0, found.objective.p95_s)[1]
    parts = [
        f'<line class="axis" x1="{LEFT}" y1="0" x2="{LEFT}" y2="{HEIGHT - BOTTOM}"/>',
        f'<line class="axis" x1="{LEFT}" y1="{HEIGHT - BOTTOM}" x2="{WIDTH}" y2="{HEIGHT - BOTTOM}"/>',
        f'<line class="goal" x1="{LEFT}" y1="{goal}" x2="{WIDTH}" y2="{goal}"/>',
        f'<text x="2" y="{goal + 4}">{found.objective.p95_s:g} s</text>',
        f'<text x="{WIDTH - 12}" y="{HEIGHT - 12}" text-anchor="end">{most} sessions</text>',
        line("p95", [at(s.sessions, s.p95_s or 0.0) for s in steps]),
        line("p50", [at(s.sessions, s.p50_s) for s in steps if s.p50_s is not None]),
    ]
    for s in steps:
        x, y = at(s.sessions, s.p95_s or 0.0)
        parts.append(
            f'<circle class="{"held" if s.met else "not"}" cx="{x}" cy="{y}" r="4"><title>{s.sessions} sessions: '
            f"p95 {s.p95_s:.2f} s</title></circle>"
        )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Delay over sessions">{"".join(parts)}</svg>'
