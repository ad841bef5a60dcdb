"""What all accounts together hold."""

import os

from sqlalchemy import create_engine, text

with create_engine(os.environ["TXBOX_DATABASE_URL"]).connect() as connection:
    print(connection.execute(text("SELECT sum(cents) FROM account")).scalar_one(), "cents")
