"""The two forms of log lines: text for people, JSON for collectors of logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

TEXT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"


class JsonLines(logging.Formatter):
    """Writes each record as one JSON object on one line: `time` (UTC), `level`, `logger`, `message`, and its fields.

    A traceback is in `traceback`. What a record carries as `event` and `fields`, as lines about requests and sessions
    do, stands in `message` and as members of the object.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end. Characters beyond ASCII are escaped, so that no text can add a line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "event", None) or record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(getattr(record, "fields", {}) | line)


def formatter(form: str) -> logging.Formatter:
    """Return the formatter of `--log-format`: `text` or `json`."""
    return JsonLines() if form == "json" else logging.Formatter(TEXT)
