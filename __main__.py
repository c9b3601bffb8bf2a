"""Entry point of the ``holdfast`` command."""


def main() -> None:
    from .daemon.cli import main as cli_main

    cli_main()


if __name__ == "__main__":
    main()
