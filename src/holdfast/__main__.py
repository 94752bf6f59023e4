import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder: a file there could take the place of any package

from holdfast.cli import main

main()
