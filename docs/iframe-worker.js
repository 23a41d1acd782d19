// A page that is opened from a folder may start no worker, and the theme's search is one: it runs
// in a hidden frame there. (The theme would load such a script from the network.)
if (location.protocol === 'file:') {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const home = new URL(url, document.baseURI);  // some versions of the theme: relative
      this.frame = document.createElement('iframe');
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.document.write('<body></body>');
      inside.document.close();
      inside.postMessage = data => {
        const event = new MessageEvent('message', {data});
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(
        () => new Promise((done, failed) => {
          const script = inside.document.createElement('script');
          script.src = new URL(each, home).href;
          script.onload = done;
          script.onerror = failed;
          inside.document.body.appendChild(script);
        })), Promise.resolve());
      this.ready = inside.importScripts(home);
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent('message', {data})));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
