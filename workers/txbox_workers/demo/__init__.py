"""The demo: real purchases through a broker that duplicates and workers that are killed, counted to the cent."""
