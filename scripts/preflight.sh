#!/bin/sh
# Says in one message what a fresh machine lacks, before anything is installed.
python=${1:-python3}
missing=""
if ! command -v "$python" >/dev/null 2>&1; then
  echo "hetero: no $python here: install Python 3.11 to 3.13 (apt install python3 python3-venv python3-dev)" >&2
  exit 3
fi
"$python" - <<'EOF' || exit 3
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"hetero: Python {sys.version.split()[0]} found, 3.11 to 3.13 needed; name one with make PYTHON=...")
EOF
"$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
"$python" - >/dev/null 2>&1 <<'EOF' || missing="$missing python3-dev"
import os, sysconfig
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
EOF
command -v g++ >/dev/null 2>&1 || command -v c++ >/dev/null 2>&1 || missing="$missing g++"
if [ -n "$missing" ]; then
  echo "hetero: this machine lacks:$missing (apt install$missing)" >&2
  exit 3
fi
