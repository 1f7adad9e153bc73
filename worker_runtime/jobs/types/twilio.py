"""SMS and WhatsApp by Twilio's Messages API, or another service that speaks it.

`POST /2010-04-01/Accounts/<account>/Messages.json`, a form with `To`, `From` and `Body`,
answered by 201 and the message's `sid`, or by `{"code": 21211, …}`. It knows no key that
would make a repeat harmless.
"""

from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from worker_runtime.jobs.config import MessagingOutlet
from worker_runtime.jobs.protocol.catalog import SendSms, SendWhatsapp
from worker_runtime.jobs.types.job_type import JobContext
from worker_runtime.jobs.types.message import MessageRefused, ProviderRequest


class SmsProvider:
    arguments: type[msgspec.Struct] = SendSms

    def __init__(self, outlet: MessagingOutlet) -> None:
        self.outlet = outlet

    def request(self, message: Any, context: JobContext) -> ProviderRequest:
        """Raises `MessageRefused` if there is no sender."""
        account, form = self.outlet.account, self.form(message)
        login = b64encode(f"{account}:{self.outlet.token}".encode()).decode()
        return ProviderRequest(
            f"{self.outlet.url.rstrip('/')}/2010-04-01/Accounts/{quote(account, safe='')}"
            "/Messages.json",
            {
                "Authorization": f"Basic {login}",
                "Content-Type": "application/x-www-form-urlencoded",
            },
            urlencode(form).encode(),
        )

    def form(self, message: Any) -> dict[str, str]:
        """Returns the fields of the form."""
        sender = self.outlet.sms_sender
        if not sender:
            raise MessageRefused("BERTH_MESSAGING_SMS_SENDER is not set")
        field = "MessagingServiceSid" if sender.startswith("MG") else "From"
        return {"To": message.to, field: sender, "Body": message.text}

    def message_id(self, answer: Mapping[str, Any]) -> str:
        return str(answer.get("sid", ""))

    def error_code(self, answer: Mapping[str, Any]) -> str:
        code = answer.get("code")
        return str(code) if isinstance(code, int) else ""


class WhatsappProvider(SmsProvider):
    arguments = SendWhatsapp

    def form(self, message: Any) -> dict[str, str]:
        if not self.outlet.whatsapp_sender:
            raise MessageRefused("BERTH_MESSAGING_WHATSAPP_SENDER is not set")
        ends = {"To": f"whatsapp:{message.to}", "From": f"whatsapp:{self.outlet.whatsapp_sender}"}
        if message.template is None:
            return {**ends, "Body": message.text}
        variables = msgspec.json.encode(message.variables).decode()
        return {**ends, "ContentSid": message.template, "ContentVariables": variables}
