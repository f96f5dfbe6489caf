"""Runs the command line as `python -m antiphon`."""

from antiphon.cli.main import main

raise SystemExit(main())
