"""How messages travel: what each kind of destination can take, and how a message is written for it. Pure, no I/O."""
