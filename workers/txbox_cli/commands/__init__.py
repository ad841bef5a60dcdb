"""The commands of ``txbox``, one file each."""
