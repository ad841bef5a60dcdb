"""Bulk loads: their chunks, their pace, and what they wait for."""
