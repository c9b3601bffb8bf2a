"""Entry point of the ``holdfast`` command."""


def main() -> None:
    from .daemon.cli.command_line import main as cli_main

    cli_main()


if __name__ == "__main__":
    main()
