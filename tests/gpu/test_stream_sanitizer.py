"""No stream touches what another has not done with, as far as torch's CUDA sanitizer can see."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("under_stream_sanitizer.py")


def test_lanes_wait_for_each_other_where_they_share_tensors():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.count("nothing reported") == 2
