"""Export the library, run chapters without a GPU, keep their outputs, and clean them."""

import argparse
import os
import sys

from book import Book


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapter", help="number, name or stem, as in 10 or gated_delta; or all")
    key, book = parser.parse_args().chapter, Book()
    chapters = book.chapters if key == "all" else [book.chapter(key)]
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

    import papermill
    from nbdev.clean import nbdev_clean
    from nbdev.doclinks import nbdev_export

    nbdev_export.__wrapped__()
    for chapter in chapters:
        how = dict(cwd=chapter.path.parent, kernel_name="python3", coalesce_streams=True)  # a cell's prints in one piece
        papermill.execute_notebook(chapter.path, chapter.path, **how)
        nbdev_clean(str(chapter.path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
