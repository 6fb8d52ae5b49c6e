"""``python -m nntask`` is the `nntask` command."""

from wrappers.cli import main

raise SystemExit(main())
