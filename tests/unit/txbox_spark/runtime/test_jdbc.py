"""What the JDBC driver is told, for all that a database URL can say."""

import pytest
from sqlalchemy import URL, make_url

from txbox import InvalidConfiguration
from txbox_spark.runtime.jdbc import jdbc_options


def jdbc_url(text: str) -> str:
    return jdbc_options(make_url(text))["url"]


def test_a_plain_url() -> None:
    assert jdbc_options(make_url("postgresql+psycopg://alice:secret@db.example:5433/shop")) == {
        "url": "jdbc:postgresql://db.example:5433/shop",
        "user": "alice",
        "password": "secret",
        "driver": "org.postgresql.Driver",
    }


def test_without_a_password_there_is_none() -> None:
    assert "password" not in jdbc_options(make_url("postgresql://alice@db/shop"))


@pytest.mark.parametrize("place", ["alice:pass%23w%26rd@db/shop", "alice@db/shop?password=pass%23w%26rd"])
def test_secrets_are_not_part_of_the_url(place: str) -> None:
    options = jdbc_options(make_url(f"postgresql://{place}{'&' if '?' in place else '?'}sslpassword=key%20word"))
    assert options["password"] == "pass#w&rd"
    assert options["sslpassword"] == "key word"
    assert options["url"] == "jdbc:postgresql://db:5432/shop"


@pytest.mark.parametrize(
    ("given", "translated"),
    [
        ("application_name=nightly%20load", "ApplicationName=nightly%20load"),
        ("connect_timeout=5", "connectTimeout=5"),
        ("connect_timeout=-1", "connectTimeout=0"),
        ("txbox_watchdog_seconds=60&connect_timeout=5", "connectTimeout=5"),
        ("options=-csearch_path%3Dbilling", "options=-csearch_path%3Dbilling"),
        ("options=-c%20a%3Db%2Bc", "options=-c%20a%3Db%2Bc"),
        ("sslmode=verify-full&sslrootcert=/etc/ca%26.pem", "sslmode=verify-full&sslrootcert=%2Fetc%2Fca%26.pem"),
        (
            "sslmode=verify-full&sslrootcert=system",
            "sslmode=verify-full&sslfactory=org.postgresql.ssl.DefaultJavaSSLFactory",
        ),
        ("sslrootcert=system", "sslmode=verify-full&sslfactory=org.postgresql.ssl.DefaultJavaSSLFactory"),
        ("sslcert=/c&sslkey=/k", "sslcert=%2Fc&sslkey=%2Fk"),
        ("target_session_attrs=any", "targetServerType=any"),
        ("target_session_attrs=primary", "targetServerType=primary"),
        ("target_session_attrs=read-write", "targetServerType=primary"),
        ("target_session_attrs=standby", "targetServerType=secondary"),
        ("target_session_attrs=read-only", "targetServerType=secondary"),
        ("target_session_attrs=prefer-standby", "targetServerType=preferSecondary"),
        ("load_balance_hosts=random", "loadBalanceHosts=true"),
        ("keepalives=1", "tcpKeepAlive=true"),
        ("channel_binding=require", "channelBinding=require"),
        ("gssencmode=disable", "gssEncMode=disable"),
        ("sslnegotiation=direct", "sslNegotiation=direct"),
        ("krbsrvname=pg", "kerberosServerName=pg"),
        ("prepareThreshold=0", "prepareThreshold=0"),
        ("prepare_threshold=None", "prepareThreshold=0"),
        ("prepare_threshold=0", "prepareThreshold=0"),
        ("prepare_threshold=7", "prepareThreshold=7"),
    ],
)
def test_parameters_are_translated(given: str, translated: str) -> None:
    assert jdbc_url(f"postgresql://alice@db/shop?{given}") == f"jdbc:postgresql://db:5432/shop?{translated}"


def test_an_idle_transaction_is_bounded_unless_the_url_says_otherwise() -> None:
    bounded = jdbc_options(make_url("postgresql://alice@db/shop"), idle_seconds=60)["url"]
    assert bounded.endswith("?options=-c%20idle_in_transaction_session_timeout%3D60000")
    theirs = make_url("postgresql://alice@db/shop?options=-cidle_in_transaction_session_timeout%3D5")
    assert jdbc_options(theirs, idle_seconds=60)["url"].endswith("60000%20-cidle_in_transaction_session_timeout%3D5")


def test_what_only_tunes_libpq_is_left_out() -> None:
    assert jdbc_url("postgresql://a@db/shop?keepalives_idle=10&tcp_user_timeout=9") == "jdbc:postgresql://db:5432/shop"


@pytest.mark.parametrize(
    ("place", "addresses"),
    [
        ("alice@[::1]:5433/shop", "[::1]:5433"),
        ("alice@[2001:db8::7]/shop", "[2001:db8::7]:5432"),
        ("alice@/shop?host=one:1&host=two:2", "one:1,two:2"),
        ("alice@/shop?host=one,two&port=1,2", "one:1,two:2"),
        ("alice@/shop?host=one,two", "one:5432,two:5432"),
        ("alice@/shop?host=one,::1&port=1,", "one:1,[::1]:5432"),
    ],
)
def test_hosts(place: str, addresses: str) -> None:
    assert jdbc_url(f"postgresql://{place}") == f"jdbc:postgresql://{addresses}/shop"


def test_the_database_is_encoded_and_is_the_users_if_none_is_named() -> None:
    odd = URL.create("postgresql", username="a b", host="db", database="sh?op/1+1 %")
    assert jdbc_options(odd)["url"] == "jdbc:postgresql://db:5432/sh%3Fop%2F1%2B1%20%25"
    assert jdbc_options(URL.create("postgresql", username="a b", host="db"))["url"] == "jdbc:postgresql://db:5432/a%20b"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("postgresql://alice@/shop", "names no host"),
        ("postgresql://alice@/shop?host=one,,two", "names no host"),
        ("postgresql://alice@/shop?host=/run/postgresql", "Unix socket /run/postgresql"),
        ("postgresql://alice@/shop?host=%40abstract", "Unix socket"),
        ("postgresql://alice@/shop?host=a/b", "is no host"),
        ("postgresql://db/shop", "names no user"),
        ("postgresql://alice@db/shop?sslcrl=/crl", "has sslcrl"),
        ("postgresql://alice@db/shop?sslmode=require&sslrootcert=system", "goes with sslmode=verify-full"),
        ("postgresql://alice@db/shop?service=x", "has service"),
        ("postgresql://alice@db/shop?target_session_attrs=other", "target_session_attrs=other"),
        ("postgresql://alice@db/shop?connect_timeout=soon", "connect_timeout=soon"),
        ("postgresql://alice@db/shop?sslmode=require&sslmode=disable", "sslmode more than once"),
        ("postgresql://alice@/shop?host=one,two&port=1,2,3", "cannot be used"),
        ("mysql://alice@db/shop", "mysql:// cannot be used"),
    ],
)
def test_what_jdbc_cannot_reach_is_refused(url: str, why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=why):
        jdbc_options(make_url(url))


def test_no_refusal_shows_a_password() -> None:
    with pytest.raises(InvalidConfiguration) as refusal:
        jdbc_options(make_url("postgresql://alice:hidden@/shop?sslcrl=x"))
    assert "hidden" not in str(refusal.value)


def test_behind_a_pooler_nothing_is_prepared() -> None:
    place = make_url("postgresql://alice@db/shop?prepare_threshold=5")
    assert jdbc_options(place, prepare=False)["url"].endswith("/shop?prepareThreshold=0")
