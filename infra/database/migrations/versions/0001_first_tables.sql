create sequence control_number as bigint

create sequence switch_version as bigint

create table audit_trail (
  id bigint generated always as identity,
  at timestamptz default clock_timestamp() not null,
  actor varchar(128) not null,
  action varchar(64) not null,
  subject varchar(160) not null,
  data jsonb not null,
  primary key (id)
)

create index audit_trail_by_subject on audit_trail (subject, id)

create table daily_reports (
  day date not null,
  since timestamptz not null,
  until timestamptz not null,
  figures jsonb not null,
  made_at timestamptz default clock_timestamp() not null,
  mailed_at timestamptz,
  primary key (day)
)

create table maintenance_passes (
  id bigint generated always as identity,
  began_at timestamptz default clock_timestamp() not null,
  generation varchar(64) not null,
  server varchar(64) not null,
  tasks integer not null,
  boot varchar(64) not null,
  boottime double precision not null,
  scanned integer not null,
  scan_seconds double precision not null,
  guarded varchar(64) not null,
  found jsonb not null,
  suspects jsonb not null,
  confirmed jsonb not null,
  outcomes jsonb default '{}' not null,
  finished_at timestamptz,
  primary key (id)
)

create table order_tags (
  user_id varchar(64) not null,
  account_id varchar(64) not null,
  trading_day date not null,
  last bigint not null,
  primary key (user_id, account_id, trading_day)
)

create table reconciliations (
  id bigint generated always as identity,
  user_id varchar(64) not null,
  account_id varchar(64) not null,
  epoch bigint not null,
  at timestamptz default clock_timestamp() not null,
  differences jsonb not null,
  blocks boolean not null,
  resolved_at timestamptz,
  resolved_by varchar(128),
  primary key (id)
)

create index reconciliations_by_account on reconciliations (user_id, account_id)

create index reconciliations_open on reconciliations (user_id, account_id) where resolved_at is null

create table startup_tasks (
  name varchar(64) not null,
  progress jsonb default '{}' not null,
  steps integer default '0' not null,
  began_at timestamptz default clock_timestamp() not null,
  ended_at timestamptz,
  primary key (name)
)

create table switches (
  scope varchar(160) not null,
  state varchar(16) not null,
  version bigint not null,
  actor varchar(128) not null,
  reason varchar not null,
  at timestamptz default clock_timestamp() not null,
  primary key (scope),
  constraint switches_state check (state in ('open', 'reducing', 'halted'))
)

create table users (
  id varchar(64) not null,
  epoch bigint default '0' not null,
  created_at timestamptz default now() not null,
  disabled_at timestamptz,
  removed_at timestamptz,
  primary key (id)
)

create table webhook_deliveries (
  webhook_id uuid not null,
  digest varchar(64) not null,
  order_id uuid,
  refused varchar(300),
  at timestamptz default clock_timestamp() not null,
  alert jsonb,
  until timestamptz,
  held_until timestamptz,
  primary key (webhook_id, digest)
)

create index webhook_deliveries_by_time on webhook_deliveries (at)

create index webhook_deliveries_under_way on webhook_deliveries (held_until) where held_until is not null

create table worker_transitions (
  id bigint generated always as identity,
  user_id varchar(64) not null,
  chain varchar(128) not null,
  number bigint not null,
  at timestamptz not null,
  before varchar(32) not null,
  after varchar(32) not null,
  reason varchar not null,
  worker_id varchar(128) not null,
  epoch bigint not null,
  deadline timestamptz,
  recorded_at timestamptz default clock_timestamp() not null,
  primary key (id),
  constraint worker_transitions_number unique (chain, number)
)

create index worker_transitions_by_user on worker_transitions (user_id, id)

create table allowed_images (
  image varchar(512) not null,
  actor varchar(128) not null,
  reason varchar not null,
  added_at timestamptz default clock_timestamp() not null,
  primary key (image)
)

create table api_keys (
  id uuid not null,
  key_hash varchar(64) not null,
  prefix varchar(16) not null,
  role varchar(16) not null,
  user_id varchar(64),
  label varchar(128) default '' not null,
  created_at timestamptz default now() not null,
  last_used_at timestamptz,
  expires_at timestamptz,
  revoked_at timestamptz,
  session_of uuid,
  primary key (id),
  constraint api_keys_role check (role in ('user', 'operator', 'admin')),
  unique (key_hash),
  foreign key(user_id) references users (id),
  foreign key(session_of) references api_keys (id)
)

create table broker_accounts (
  user_id varchar(64) not null,
  account_id varchar(64) not null,
  broker varchar(32) not null,
  broker_type varchar(32) not null,
  simulation boolean not null,
  created_at timestamptz default now() not null,
  reported_epoch bigint default '0' not null,
  reported_ms bigint default '0' not null,
  primary key (user_id, account_id),
  foreign key(user_id) references users (id)
)

create table dead_letters (
  id uuid not null,
  kind varchar(32) not null,
  source varchar(128) not null,
  subject varchar(256) not null,
  user_id varchar(64) not null,
  reason varchar not null,
  message bytea not null,
  count bigint default '1' not null,
  first_at timestamptz default clock_timestamp() not null,
  last_at timestamptz default clock_timestamp() not null,
  closed_at timestamptz,
  primary key (id)
)

create index dead_letters_by_source on dead_letters (source)

create index dead_letters_by_time on dead_letters (last_at)

create table statement_addresses (
  user_id varchar(64) not null,
  email varchar(254),
  webhook_url varchar(2048),
  updated_at timestamptz default clock_timestamp() not null,
  primary key (user_id),
  foreign key(user_id) references users (id)
)

create table worker_launches (
  worker_id varchar(128) not null,
  pool varchar(64) not null,
  version varchar(128) not null,
  task_id varchar(256),
  launched_at timestamptz default clock_timestamp() not null,
  primary key (worker_id)
)

create table worker_sessions (
  claim_id varchar(128) not null,
  user_id varchar(64) not null,
  epoch bigint not null,
  pool varchar(64) not null,
  worker_id varchar(128),
  task_id varchar(256),
  warm boolean,
  assigned_at timestamptz default clock_timestamp() not null,
  claimed_at timestamptz,
  connected_at timestamptz,
  fenced_at timestamptz,
  ended_at timestamptz,
  end_reason varchar,
  crashed boolean default false not null,
  primary key (claim_id),
  constraint worker_sessions_by_worker unique (worker_id),
  constraint worker_sessions_epoch unique (user_id, epoch),
  foreign key(user_id) references users (id)
)

create index worker_sessions_by_claim_time on worker_sessions (pool, claimed_at)

create index worker_sessions_crashed on worker_sessions (user_id, ended_at) where crashed

create index worker_sessions_open on worker_sessions (claim_id) where ended_at is null and worker_id is not null

create index worker_sessions_unended on worker_sessions (user_id) where ended_at is null

create table account_limits (
  user_id varchar(64) not null,
  account_id varchar(64) not null,
  max_quantity integer,
  max_notional numeric(18, 6),
  max_daily_orders integer,
  duplicate_window_s integer,
  primary key (user_id, account_id),
  foreign key(user_id, account_id) references broker_accounts (user_id, account_id)
)

create table credentials (
  user_id varchar(64) not null,
  account_id varchar(64) not null,
  version integer not null,
  ciphertext bytea not null,
  nonce bytea not null,
  wrapped_key bytea not null,
  master_key_id varchar(128) not null,
  updated_at timestamptz default now() not null,
  primary key (user_id, account_id),
  foreign key(user_id, account_id) references broker_accounts (user_id, account_id)
)

create table orders (
  id uuid not null,
  user_id varchar(64) not null,
  account_id varchar(64) not null,
  client_order_id varchar(64) not null,
  fingerprint varchar(64) not null,
  symbol varchar(32) not null,
  side varchar(8) not null,
  quantity integer not null,
  price_type varchar(8) not null,
  price numeric(18, 6),
  time_in_force varchar(8) not null,
  tag varchar(6) not null,
  trading_day date not null,
  state varchar(16) not null,
  reason_code varchar(64),
  reason varchar,
  broker_order_id varchar(64),
  filled_quantity integer default '0' not null,
  average_price numeric(18, 6),
  generation varchar(64) not null,
  first_epoch bigint default '0' not null,
  deadline_at timestamptz not null,
  created_at timestamptz default clock_timestamp() not null,
  updated_at timestamptz default clock_timestamp() not null,
  reduce_only boolean default false not null,
  origin varchar(64) default '' not null,
  verify_at timestamptz default clock_timestamp() + interval '2 seconds',
  attention varchar,
  attention_at timestamptz,
  changed bigint default cast(cast(pg_current_xact_id() as text) as bigint) not null,
  primary key (id),
  constraint orders_client_order_id unique (user_id, client_order_id),
  constraint orders_tag unique (user_id, account_id, trading_day, tag),
  constraint orders_quantity check (quantity > 0)
)

create index orders_by_change on orders (user_id, changed)

create index orders_by_state on orders (state, updated_at)

create index orders_by_time on orders using brin (created_at) with (autosummarize = on)

create index orders_by_user on orders (user_id, created_at)

create index orders_to_verify on orders (verify_at) where verify_at is not null

create index orders_unsettled on orders (user_id, account_id) where state in ('unknown', 'submitting')

create table webhooks (
  id uuid not null,
  token_hash varchar(64) not null,
  secret_hash varchar(64) not null,
  user_id varchar(64) not null,
  account_id varchar(64) not null,
  sources varchar(64)[] default '{}' not null,
  window_s integer default 60 not null,
  created_at timestamptz default clock_timestamp() not null,
  revoked_at timestamptz,
  primary key (id),
  foreign key(user_id, account_id) references broker_accounts (user_id, account_id),
  unique (token_hash)
)

create table order_events (
  event_id varchar(160) not null,
  order_id uuid not null,
  state varchar(16) not null,
  at timestamptz not null,
  data jsonb not null,
  recorded_at timestamptz default clock_timestamp() not null,
  primary key (event_id),
  foreign key(order_id) references orders (id)
)

create index order_events_by_order on order_events (order_id, at)

create table worker_scripts (
  sha varchar(40) not null,
  source varchar not null,
  seen_at timestamptz default clock_timestamp() not null,
  primary key (sha)
)

create function audit_trail_is_append_only() returns trigger language plpgsql as $$
begin raise exception 'the audit trail is append-only'; end $$

create trigger audit_trail_append_only before update or delete or truncate on audit_trail
for each statement execute function audit_trail_is_append_only()

create function order_changed() returns trigger language plpgsql as $$
begin
  new.changed := cast(cast(pg_current_xact_id() as text) as bigint);
  perform pg_notify('berth_orders', new.user_id);
  return new;
end $$

create trigger orders_changed before update on orders for each row
when (
  row(old.state, old.reason_code, old.reason, old.broker_order_id, old.filled_quantity, old.average_price,
      old.attention, old.quantity, old.price)
  is distinct from
  row(new.state, new.reason_code, new.reason, new.broker_order_id, new.filled_quantity, new.average_price,
      new.attention, new.quantity, new.price)
) execute function order_changed()
