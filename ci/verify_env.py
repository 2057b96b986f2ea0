"""Exit 0 if every installed distribution is whole: its RECORD is there and each file it lists, in full.

An interrupted installation leaves a distribution without RECORD, with missing or cut files, or renamed to
"~name". `python -m pip` does not notice; this does, from sizes alone, in a second or two.
"""

import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path


def main() -> int:
    site = Path(sysconfig.get_path("purelib"))
    broken = [path.name for path in site.glob("~*")]
    for dist in distributions(path=[str(site)]):
        name = dist.metadata["Name"]
        if not name or dist.files is None:
            broken.append(f"{name} (no RECORD)")
            continue
        for file in dist.files:
            path = Path(str(file.locate()))
            # Byte code is rewritten at will.
            if path.suffix == ".pyc" or (file.size is None and path.exists()):
                continue
            if not path.exists() or path.stat().st_size != file.size:
                broken.append(f"{name} ({file})")
                break
    for what in broken:
        print(f"incomplete: {what}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
