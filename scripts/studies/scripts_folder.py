"""Importing this lets a study import `bench`, which lies beside this folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
