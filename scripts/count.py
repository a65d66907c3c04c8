"""Print the sizes of the tree, from the files that git tracks: `make count`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tercet.config.flags import key_options

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]

    def under(folder: str, *suffixes: str) -> list[Path]:
        return [file for file in files if file.is_relative_to(ROOT / folder) and file.suffix in suffixes]

    def lines(found: list[Path]) -> int:
        return sum(file.read_bytes().count(b"\n") for file in found)

    source = under("src", ".py")
    pages = [file for file in files if file.suffix == ".md" and file.name != "CHANGELOG.md"]
    beside = [file for file in files if file.is_relative_to(ROOT / "src") and file.suffix != ".py"]
    counts = {
        "src lines": lines(source),
        "modules without __init__": sum(file.name != "__init__.py" for file in source),
        "test lines": lines(under("tests", ".py")),
        "script lines": lines(under("scripts", ".py", ".sh", ".toml")),
        "words in docs and README": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "settings (leaf keys)": len(key_options({})),
        "package data, bytes": sum(file.stat().st_size for file in beside),
    }
    for package in sorted(path for path in (ROOT / "src" / "tercet").iterdir() if (path / "__init__.py").exists()):
        counts[f"  {package.name}"] = lines(under(f"src/tercet/{package.name}", ".py"))
    for name, count in counts.items():
        print(f"{name:28}{count:>10,}")


if __name__ == "__main__":
    main()
