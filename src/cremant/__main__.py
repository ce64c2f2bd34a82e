# SPDX-License-Identifier: Apache-2.0
"""`python -m cremant` is the command `cremant`."""

from cremant.cli.main import run

if __name__ == "__main__":
    run()
