"""The Python that pages show is complete: each name is imported, made above on the page, or said to be the reader's."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from support.documents import blocks

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "examples").glob("*/README.md")]
YOURS = {"engine", "gateway", "queue_url", "sqs"}
"""What a page may leave to its reader, if its prose names it."""


def test_every_name_in_a_block_of_python_is_imported_or_made_or_said_to_be_yours(tmp_path: Path) -> None:
    prose = {}
    for page in PAGES:
        name = "-".join(page.relative_to(REPOSITORY).with_suffix("").parts)
        prose[name] = page.read_text()
        programs: dict[str, str] = defaultdict(str)  # blocks without a title are one program
        for block in blocks(page):
            prose[name] = prose[name].replace(block.text, "")
            if block.language == "python":
                programs[block.title] = block.text if block.title else f"{programs['']}\n{block.text}"
        for number, program in enumerate(programs.values()):
            (tmp_path / f"{name}.{number}.py").write_text(program)
    assert len(list(tmp_path.iterdir())) > 40
    rules = ["--isolated", "--select", "E9,F401,F811,F821", "--target-version", "py311", "--output-format", "json"]
    ruff = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *rules, str(tmp_path)], capture_output=True, text=True, check=False
    )
    faults = {(Path(one["filename"]).name.partition(".")[0], one["message"]) for one in json.loads(ruff.stdout)}
    said = {(page, f"Undefined name `{name}`") for page, text in prose.items() for name in YOURS if f"`{name}`" in text}
    assert sorted(faults - said) == []
