alter table webhooks
  add column previous_secret_hash varchar(64),
  add column previous_secret_until timestamptz,
  add column label varchar(128) default '' not null,
  add column quantity_unit varchar(16),
  add column odd varchar(16) default 'refuse' not null,
  add column entry_mode varchar(16) default 'open' not null,
  add column price_rounding varchar(16) default 'safe' not null,
  add column made_by uuid,
  add column expires_at timestamptz,
  add column paused_at timestamptz,
  add constraint webhooks_quantity_unit check (quantity_unit in ('shares', 'lots')),
  add constraint webhooks_odd check (odd in ('split', 'refuse', 'round_down')),
  add constraint webhooks_entry_mode check (entry_mode in ('open', 'delta')),
  add constraint webhooks_price_rounding check (price_rounding in ('safe', 'refuse'))

create index webhooks_by_user on webhooks (user_id, created_at, id)

create table webhook_calls (
  id bigint generated always as identity,
  webhook_id uuid not null,
  user_id varchar(64) not null,
  account_id varchar(64) not null,
  received_at timestamptz default clock_timestamp() not null,
  source varchar(64) default '' not null,
  test boolean default false not null,
  body varchar,
  digest varchar(64),
  signal jsonb,
  symbol varchar(32),
  unit varchar(16),
  quantity integer,
  settings jsonb,
  plan jsonb,
  lane varchar(32),
  state varchar(16) not null,
  deadline_at timestamptz,
  held_until timestamptz,
  held_by uuid,
  outcome varchar(64),
  reason varchar(500),
  order_ids uuid[] default '{}' not null,
  repeats integer default 0 not null,
  answered_ms integer,
  completed_at timestamptz,
  notified_at timestamptz,
  primary key (id),
  constraint webhook_calls_state check (state in ('queued', 'running', 'done', 'refused'))
)

create index webhook_calls_by_webhook on webhook_calls (webhook_id, id)

create unique index webhook_calls_digest on webhook_calls (webhook_id, digest) where digest is not null and not test

create index webhook_calls_queue on webhook_calls (user_id, account_id, lane, id) where completed_at is null

create index webhook_calls_by_time on webhook_calls using brin (received_at) with (autosummarize = on)

create table symbol_names (
  name varchar(64) not null,
  symbol varchar(32) not null,
  actor varchar(128) not null,
  at timestamptz default clock_timestamp() not null,
  primary key (name)
)
