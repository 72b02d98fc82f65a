"""``python -m lightning_longctx`` is the ``lightning-longctx`` command."""

from lightning_longctx.cli import main

if __name__ == "__main__":
    main()
