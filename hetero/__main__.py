"""``python -m hetero`` is the ``hetero`` command."""

from hetero.entry import main

main()
