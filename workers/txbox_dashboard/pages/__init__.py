"""The pages: a file for each, with its statements beside it; the templates are in ``templates/``."""
