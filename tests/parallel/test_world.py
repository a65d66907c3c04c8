from __future__ import annotations

import subprocess

import pytest

from parallel.world import torchrun


def test_a_launch_that_is_cut_off_is_no_ordinary_result(tmp_path):
    (tmp_path / "never.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(subprocess.TimeoutExpired):
        torchrun(1, str(tmp_path / "never.py"), timeout=0.5)
