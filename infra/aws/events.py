"""Makes the queues, alarms and dashboard for what ECS says of its tasks and for what nobody could
deliver, and decides who hears of it."""

from collections.abc import Sequence

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_elasticloadbalancingv2 as elb
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.aws.data import Storage
from infra.aws.hosts import Hosts
from infra.aws.stages import AwsStage
from infra.launchers.ecs.records import GROUP

#: Deliveries of a message until it is a dead letter, and how long dead letters are kept.
MAX_DELIVERIES, RETENTION = 10, Duration.days(14)


class TaskEvents(Construct):
    """Changes of user workers: EventBridge → one queue, which one orchestrator at a time reads."""

    def __init__(self, scope: Construct, hosts: Hosts) -> None:
        super().__init__(scope, "TaskEvents")
        #: Messages that no orchestrator could read, and events that EventBridge could not deliver.
        self.dead = [self._queue(name, retention=RETENTION) for name in ("Unread", "Undelivered")]
        self.queue = self._queue(
            "Changes",
            retention=Duration.days(1),
            visibility=Duration.seconds(60),
            dead_letters=sqs.DeadLetterQueue(queue=self.dead[0], max_receive_count=MAX_DELIVERIES),
        )
        events.Rule(
            self,
            "Rule",
            description="Berth: state changes of user workers",
            event_pattern=events.EventPattern(
                source=["aws.ecs"],
                detail_type=["ECS Task State Change"],
                detail={"clusterArn": [hosts.cluster.cluster_arn], "group": [{"prefix": GROUP}]},
            ),
            targets=[
                targets.SqsQueue(
                    self.queue,
                    dead_letter_queue=self.dead[1],
                    max_event_age=Duration.hours(1),
                    retry_attempts=20,
                )
            ],
        )

    def _queue(
        self,
        name: str,
        *,
        retention: Duration,
        visibility: Duration | None = None,
        dead_letters: sqs.DeadLetterQueue | None = None,
    ) -> sqs.Queue:
        return sqs.Queue(
            self,
            name,
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            retention_period=retention,
            visibility_timeout=visibility,
            dead_letter_queue=dead_letters,
        )


class Alarms(Construct):
    """Calls people by mail, and shows the same figures on a dashboard."""

    def __init__(
        self,
        scope: Construct,
        stage: AwsStage,
        key: kms.IKey,
        mail: str,
        *,
        task_events: TaskEvents,
        storage: Storage,
        balancer: elb.ApplicationLoadBalancer,
        server_logs: Sequence[logs.LogGroup],
        hosts: Hosts,
    ) -> None:
        super().__init__(scope, "Alarms")
        self._stage = stage
        topic = sns.Topic(self, "Topic", master_key=key, enforce_ssl=True)
        topic.add_subscription(subscriptions.EmailSubscription(mail))
        topic.grant_publish(iam.ServicePrincipal("cloudwatch.amazonaws.com"))
        self._call = actions.SnsAction(topic)
        self._shown: list[cloudwatch.Alarm] = []

        for name, queue in zip(("unread", "undelivered"), task_events.dead, strict=True):
            self._alarm(
                f"dead-letters-{name}",
                queue.metric_approximate_number_of_messages_visible(
                    period=Duration.minutes(1), statistic="Maximum"
                ),
                above=0,
                description="task events that nobody could handle; they are kept for 14 days",
            )
        self._alarm(
            "task-events-old",
            task_events.queue.metric_approximate_age_of_oldest_message(statistic="Maximum"),
            above=120,
            times=3,
            description="no orchestrator reads the queue of task events",
        )
        # Every process logs one of these for what only a person can settle.
        for number, group in enumerate(server_logs):
            logs.MetricFilter(
                self,
                f"Errors{number}",
                log_group=group,
                metric_namespace="Berth",
                metric_name=f"{stage.name}-errors",
                filter_pattern=logs.FilterPattern.any(
                    logs.FilterPattern.string_value("$.level", "=", "error"),
                    logs.FilterPattern.string_value("$.level", "=", "critical"),
                ),
                default_value=0,
            )
        errors = cloudwatch.Metric(
            namespace="Berth",
            metric_name=f"{stage.name}-errors",
            statistic="Sum",
            period=Duration.minutes(5),
        )
        self._alarm("errors", errors, above=0, description="errors in the logs of our servers")
        failures = {
            "api": balancer.metrics.http_code_target(
                elb.HttpCodeTarget.TARGET_5XX_COUNT, statistic="Sum"
            ),
            # Which answers itself when no task of the API does.
            "balancer": balancer.metrics.http_code_elb(
                elb.HttpCodeElb.ELB_5XX_COUNT, statistic="Sum"
            ),
        }
        for name, metric in failures.items():
            self._alarm(
                f"{name}-5xx",
                metric,
                above=10,
                description=f"answers of the {name} with 5xx in 5 minutes",
            )
        database = storage.database
        self._alarm(
            "database-cpu",
            database.metric_cpu_utilization(),
            above=80,
            times=3,
            description="PostgreSQL is busy",
        )
        self._alarm(
            "database-space",
            database.metric_free_storage_space(statistic="Minimum"),
            below=5 * 1024**3,
            description="PostgreSQL has less than 5 GiB left",
        )
        valkey = storage.valkey
        self._alarm(
            "valkey",
            valkey.alarm_metric,
            above=valkey.alarm_above,
            below=valkey.alarm_below,
            without_figures=valkey.alarm_without_figures,
            description=valkey.alarm_text,
        )
        workers = [
            cloudwatch.Metric(
                namespace="AWS/ECS",
                metric_name=name,
                dimensions_map={"ClusterName": hosts.cluster.cluster_name},
                period=Duration.minutes(1),
                statistic="Average",
            )
            for name in ("CPUReservation", "MemoryReservation")
        ]
        cloudwatch.Dashboard(
            self,
            "Dashboard",
            dashboard_name=f"berth-{stage.name}",
            widgets=[
                [cloudwatch.AlarmStatusWidget(alarms=self._shown, width=24, title="Alarms")],
                [
                    self._graph(
                        "Dead letters",
                        *(
                            queue.metric_approximate_number_of_messages_visible()
                            for queue in task_events.dead
                        ),
                    ),
                    self._graph(
                        "Task events",
                        task_events.queue.metric_number_of_messages_received(),
                        task_events.queue.metric_approximate_age_of_oldest_message(),
                    ),
                    self._graph("Errors", errors),
                ],
                [
                    self._graph(
                        "API",
                        balancer.metrics.request_count(),
                        balancer.metrics.target_response_time(statistic="p99"),
                        *failures.values(),
                    ),
                    self._graph("Reserved of the hosts, %", *workers),
                    self._graph(
                        "PostgreSQL and Valkey, %",
                        database.metric_cpu_utilization(),
                        *valkey.graphs,
                    ),
                ],
            ],
        )

    def _alarm(
        self,
        name: str,
        metric: cloudwatch.IMetric,
        *,
        description: str,
        above: float | None = None,
        below: float | None = None,
        times: int = 1,
        without_figures: bool = False,
    ) -> None:
        """Creates an alarm. With `without_figures`, a metric that has none is an alarm, too."""
        missing = cloudwatch.TreatMissingData
        over = above is not None
        comparison = cloudwatch.ComparisonOperator
        alarm = cloudwatch.Alarm(
            self,
            name.title().replace("-", ""),
            alarm_name=f"berth-{self._stage.name}-{name}",
            alarm_description=f"Berth, {self._stage.name}: {description}",
            metric=metric,
            threshold=above if above is not None else below or 0,
            comparison_operator=comparison.GREATER_THAN_THRESHOLD
            if over
            else comparison.LESS_THAN_THRESHOLD,
            evaluation_periods=times,
            treat_missing_data=missing.BREACHING if without_figures else missing.NOT_BREACHING,
        )
        alarm.add_alarm_action(self._call)
        alarm.add_ok_action(self._call)
        self._shown.append(alarm)

    @staticmethod
    def _graph(title: str, *metrics: cloudwatch.IMetric) -> cloudwatch.GraphWidget:
        return cloudwatch.GraphWidget(title=title, left=list(metrics), width=8)
