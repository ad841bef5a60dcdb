"""A host with an alembic history of its own, made and run by alembic's own commands."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import Script
from alembic.util import CommandError

from txbox.schema import TABLE_NAMES, tables
from txbox_migrations import MigrationError, current_version, find_drift, include_object, upgrade_database
from txbox_migrations.steps import BASELINE, LATEST

ENV = """
from alembic import context

options = context.config.attributes["options"]
if context.is_offline_mode():
    context.configure(dialect_name="postgresql", literal_binds=True, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    with context.config.attributes["engine"].connect() as connection:
        context.configure(connection=connection, compare_server_default=True, **options)
        with context.begin_transaction():
            context.run_migrations()
"""

REVISION = """
import sqlalchemy as sa
import txbox_migrations
from alembic import op

revision = {revision!r}
down_revision = {down_revision!r}

def upgrade():
    {upgrade}

def downgrade():
    {downgrade}
"""

# Names every constraint in a way of its own; ours must keep their names all the same.
CONVENTION = {
    "pk": "pk_%(table_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "ix": "ix_%(column_0_label)s",
}


class Host:
    """A project with one table of its own, and revisions that call ours."""

    def __init__(self, folder: Path, engine: sa.Engine, schema: str | None, prefix: str) -> None:
        self.metadata = sa.MetaData(naming_convention=CONVENTION)
        sa.Table("purchase", self.metadata, sa.Column("purchase_id", sa.BigInteger, primary_key=True))
        self.place: dict[str, Any] = {"schema": schema, "prefix": prefix}
        self.folder = folder
        self.engine = engine
        self.output = io.StringIO()
        command.init(Config(folder.parent / "alembic.ini", stdout=self.output), str(folder))
        (folder / "env.py").write_text(ENV)
        where = f"schema={schema!r}, prefix={prefix!r}"
        create = f"op.execute(sa.schema.CreateSchema({schema!r}, if_not_exists=True)); " if schema else ""
        self.write(
            "h1",
            None,
            f"{create}op.create_table('purchase', sa.Column('purchase_id', sa.BigInteger, primary_key=True)); "
            f"txbox_migrations.upgrade(op, to={LATEST}, {where})",
            f"txbox_migrations.downgrade(op, to=0, {where}); op.drop_table('purchase')",
        )

    def config(self, **options: Any) -> Config:
        options.setdefault("target_metadata", self.metadata)
        config = Config(
            output_buffer=self.output, stdout=self.output, attributes={"engine": self.engine, "options": options}
        )
        config.set_main_option("script_location", str(self.folder).replace("%", "%%"))
        config.set_main_option("path_separator", "newline")
        return config

    def write(self, revision: str, down_revision: str | None, upgrade: str, downgrade: str) -> None:
        text = REVISION.format(revision=revision, down_revision=down_revision, upgrade=upgrade, downgrade=downgrade)
        (self.folder / "versions" / f"{revision}.py").write_text(text)

    def upgrade(self, revision: str = "head") -> None:
        command.upgrade(self.config(), revision)

    def autogenerate(self, **options: Any) -> str:
        """Run ``alembic revision --autogenerate`` and return what the new revision would do, then forget it."""
        script = command.revision(self.config(**options), autogenerate=True)
        assert isinstance(script, Script)
        path = Path(script.path)
        text = path.read_text()
        path.unlink()
        return text.split("def upgrade()")[1].split("def downgrade()")[0]


@pytest.fixture(params=[(None, ""), ("public", "txbox_"), ("Odd schema-%", "Odd%_")], ids=str)
def host(request: pytest.FixtureRequest, tmp_path: Path, engine: sa.Engine) -> Host:
    schema, prefix = request.param
    return Host(tmp_path / "host", engine, schema, prefix)


def test_revisions_bring_the_tables_step_by_step(host: Host, next_version: int) -> None:
    where = ", ".join(f"{name}={value!r}" for name, value in host.place.items())
    up, down = (f"txbox_migrations.{change}(op, to={{}}, {where})" for change in ("upgrade", "downgrade"))
    host.write("h2", "h1", up.format(BASELINE - 1), down.format(BASELINE - 1))  # of before the baseline
    with pytest.raises(MigrationError, match=f"^to={BASELINE - 1}: .* write {BASELINE}$"):
        host.upgrade()
    assert issubclass(MigrationError, CommandError), "alembic ends with this line, and without a traceback"
    host.write("h2", "h1", up.format(LATEST), down.format(LATEST))
    host.write("h3", "h2", up.format(next_version), down.format(LATEST))
    for revision, version in (("h1", LATEST), ("h2", LATEST), ("h3", next_version)):
        host.upgrade(revision)
        with host.engine.connect() as connection:
            assert current_version(connection, **host.place) == version
            assert find_drift(connection, **host.place) == []
    command.downgrade(host.config(), "base")
    with host.engine.connect() as connection:
        inspector = sa.inspect(connection)
        assert inspector.get_table_names() == ["alembic_version"]
        assert inspector.get_table_names(schema=host.place["schema"]) in ([], ["alembic_version"])


def test_autogenerate_leaves_our_tables_alone_with_the_filter_and_proposes_nothing_with_our_metadata(
    host: Host, make_staging: Callable[..., list[str]]
) -> None:
    host.upgrade()
    both = [host.metadata, tables(**host.place).metadata]
    ours = include_object(**host.place)
    assert "op." not in host.autogenerate(include_schemas=True, target_metadata=both)
    with host.engine.begin() as connection:
        staging = make_staging(connection, **host.place)  # of a bulk load that is at work
    names = [*(f"{host.place['prefix']}{name}" for name in TABLE_NAMES), *staging]
    without = host.autogenerate(include_schemas=True)
    assert [name for name in names if f"op.drop_table('{name}'" not in without] == []
    assert "op." not in host.autogenerate(include_schemas=True, include_object=ours)
    with host.engine.begin() as connection:
        name = f"{host.place['prefix']}processed_message"
        live = sa.Table(name, sa.MetaData(), schema=host.place["schema"], autoload_with=connection)
        sa.Index("report", live.c.processed_at).create(connection)  # what was changed in our tables
    assert "op." not in host.autogenerate(include_schemas=True, target_metadata=both, include_object=ours)
    host.metadata.tables["purchase"].append_column(sa.Column("amount", sa.BigInteger))
    proposed = host.autogenerate(include_schemas=True, include_object=ours)
    assert "op.add_column('purchase'" in proposed, "the host's own changes"
    assert "drop" not in proposed


def test_tables_of_another_place_with_names_like_ours_are_not_hidden(
    tmp_path: Path, engine: sa.Engine, make_staging: Callable[..., list[str]]
) -> None:
    host = Host(tmp_path / "host", engine, "billing", "")
    host.upgrade()
    with engine.begin() as connection:
        elsewhere = make_staging(connection, None, "")
        other_prefix = make_staging(connection, "billing", "other_")
        connection.execute(sa.text("CREATE TABLE billing.bulk_load_staging_area (note text)"))
        connection.execute(sa.text("CREATE TABLE dead_letter ()"))  # the host's
    proposed = host.autogenerate(include_schemas=True, include_object=include_object("billing"))
    dropped = re.findall(r"op\.drop_table\('(\w+)'", proposed)
    assert sorted(dropped) == sorted([*elsewhere, *other_prefix, "bulk_load_staging_area", "dead_letter"])


def test_the_version_table_of_our_history_is_filtered_too(tmp_path: Path, engine: sa.Engine) -> None:
    host = Host(tmp_path / "host", engine, None, "")
    host.write(
        "h1", None, "op.create_table('purchase', sa.Column('purchase_id', sa.BigInteger, primary_key=True))", "pass"
    )
    upgrade_database(engine)
    host.upgrade()
    assert "op.drop_table('txbox_version'" in host.autogenerate()
    assert "op." not in host.autogenerate(include_object=include_object())


def test_the_hosts_own_filter_is_asked_about_the_rest(tmp_path: Path, engine: sa.Engine) -> None:
    host = Host(tmp_path / "host", engine, None, "")
    host.upgrade()
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE spatial_ref_sys ()"))
    asked = set()

    def also(item: Any, name: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:
        asked.add(name)
        return name != "spatial_ref_sys"

    assert "op.drop_table('spatial_ref_sys'" in host.autogenerate(include_object=include_object())
    assert "op." not in host.autogenerate(include_object=include_object(also=also))
    assert {"purchase", "spatial_ref_sys"} <= asked
    assert "dead_letter" not in asked


def test_offline_the_host_must_say_since(tmp_path: Path, engine: sa.Engine) -> None:
    host = Host(tmp_path / "host", engine, None, "")
    with pytest.raises(MigrationError, match="pass since=N"):
        command.upgrade(host.config(), "head", sql=True)
    host.write("h1", None, f"txbox_migrations.upgrade(op, to={LATEST}, since=0)", "pass")
    host.output.truncate(0)
    command.upgrade(host.config(), "head", sql=True)
    assert "CREATE TABLE processed_message" in host.output.getvalue()
    assert f"IS 'txbox schema {LATEST}'" in host.output.getvalue()
