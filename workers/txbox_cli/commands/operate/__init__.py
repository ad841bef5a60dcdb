"""Commands for those who operate what others have built."""
