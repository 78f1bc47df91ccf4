"""On a GPU host: run a chapter with its measurements on, so that it writes its record and figures."""

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path

from book import Book


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapter", help="number, name or stem, as in 10 or gated_delta")
    chapter = Book().chapter(parser.parse_args().chapter)

    import papermill
    import torch

    if not torch.cuda.is_available():
        print("no GPU here: records are measured on one")
        return 2
    os.environ["DORMOUSE_RECORD"] = "1"
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what the cells print
    with tempfile.TemporaryDirectory() as folder:
        papermill.execute_notebook(
            chapter.path, Path(folder) / chapter.path.name, cwd=chapter.path.parent, kernel_name="python3", log_output=True
        )
    record = chapter.path.parents[1] / "refs" / "records" / f"{chapter.stem}.csv"
    if not record.exists():
        print(f"{chapter.path.name} ran, and wrote no {record.name}")
        return 1
    print(f"{record} is written; now, without a GPU: make refresh CHAPTER={chapter.stem[:2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
