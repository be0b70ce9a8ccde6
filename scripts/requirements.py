"""Print the requirements of pyproject.toml, so that one list serves wheel, editable install and CI.

``build`` prints what the package and its build need, ``dev`` what the tests need besides, ``fuzz`` what
``make fuzz`` does.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
build = project["project"]["dependencies"] + project["build-system"]["requires"]
groups = {
    "build": [*build, "cmake>=3.25", "ninja"],
    "dev": project["project"]["optional-dependencies"]["dev"],
    "fuzz": project["project"]["optional-dependencies"]["fuzz"],
}
print("\n".join(groups[sys.argv[1]]))
