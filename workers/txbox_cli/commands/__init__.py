"""The commands of ``txbox``; ``txbox_cli.app`` lists them, and imports one when it is asked for."""
