"""Fail unless the newest run of the demo has reached this top-1 accuracy: demo_accuracy.py 0.97"""

import json
import sys
from pathlib import Path

newest = max(Path("runs").glob("digits-*/result.json"), key=lambda path: path.stat().st_mtime)
top1 = json.loads(newest.read_text())["top1"]
print(f"{newest}: top-1 {top1:.4f}, required {sys.argv[1]}")
sys.exit(top1 < float(sys.argv[1]))
