"""Train a GPT-2 with the flags of ``nntask train``.

python examples/gpt2_custom_training.py --config-path=examples/gpt2_default_config.json --batch=4 --minibatch=1 --lr=3e-4 --steps=10
"""

import sys

from wrappers.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
