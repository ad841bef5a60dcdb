"""How files are parsed so that nothing is dropped or changed: their encodings, and the records of CSV and JSON."""
